{{- define "kvstore.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "kvstore.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains (include "kvstore.name" .) .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "kvstore.name" .) | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "kvstore.selector" -}}
app.kubernetes.io/name: {{ include "kvstore.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end }}

{{- define "kvstore.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/name: {{ include "kvstore.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "kvstore.image" -}}
{{- if .Values.image.digest }}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest }}
{{- else }}
{{- $own := ternary (printf "%s-cuda" .Chart.AppVersion) .Chart.AppVersion .Values.tiers.gpu.enabled }}
{{- printf "%s:%s" .Values.image.repository (default $own .Values.image.tag) }}
{{- end }}
{{- end }}

{{- /* A size in kvstore-server's units, 8GiB or 100GB, in bytes. */}}
{{- define "kvstore.bytes" -}}
{{- $units := dict "" 1 "B" 1 "KB" 1000 "MB" 1000000 "GB" 1000000000 "TB" 1000000000000 "KIB" 1024 "MIB" 1048576 "GIB" 1073741824 "TIB" 1099511627776 }}
{{- $number := regexFind "^[0-9]+" . | int64 }}
{{- $unit := regexReplaceAll "^[0-9]+ *" . "" | upper }}
{{- mul $number (index $units $unit) }}
{{- end }}

{{- /* Bytes in Kubernetes' unit Mi, rounded up. */}}
{{- define "kvstore.mi" -}}
{{- printf "%dMi" (div (add (int64 .) 1048575) 1048576) }}
{{- end }}

{{- /* The cpu tier, a twentieth of it for chunk metadata, and the headroom. */}}
{{- define "kvstore.memory" -}}
{{- $cpu := include "kvstore.bytes" .Values.tiers.cpu.size | int64 }}
{{- include "kvstore.mi" (add $cpu (div $cpu 20) (include "kvstore.bytes" .Values.resources.headroom | int64)) }}
{{- end }}

{{- /* The disk tier, its index, and the other files of its folder. */}}
{{- define "kvstore.diskSpace" -}}
{{- include "kvstore.mi" (add (include "kvstore.bytes" .Values.tiers.disk.size | int64) 1073741824) }}
{{- end }}

{{- define "kvstore.tiers" -}}
{{- $names := list }}
{{- if .Values.tiers.gpu.enabled }}{{ $names = append $names "gpu" }}{{ end }}
{{- $names = append $names "cpu" }}
{{- if .Values.tiers.disk.enabled }}{{ $names = append $names "disk" }}{{ end }}
{{- if .Values.tiers.redis.enabled }}{{ $names = append $names "redis" }}{{ end }}
{{- join "," $names }}
{{- end }}

{{- define "kvstore.hasTLS" -}}
{{- if or .Values.tls.existingSecret .Values.tls.certManager.enabled }}yes{{ end }}
{{- end }}

{{- define "kvstore.tlsSecret" -}}
{{- default (printf "%s-tls" (include "kvstore.fullname" .)) .Values.tls.existingSecret }}
{{- end }}

{{- define "kvstore.hasAuth" -}}
{{- if or .Values.auth.existingSecret.name .Values.auth.jwt.existingSecret.name (and .Values.tls.clientCA (include "kvstore.hasTLS" .)) }}yes{{ end }}
{{- end }}

{{- /* Whether pods are in the directory; config.directory overrides. */}}
{{- define "kvstore.hasDirectory" -}}
{{- $asked := .Values.redis.directory }}
{{- if hasKey .Values.config "directory" }}{{ $asked = .Values.config.directory }}{{ end }}
{{- if and .Values.tiers.redis.enabled $asked }}yes{{ end }}
{{- end }}

{{- define "kvstore.redisName" -}}
{{- printf "%s-redis" (include "kvstore.fullname" .) }}
{{- end }}

{{- /* The secret with Redis' password, if separate: mounted, as URLs cannot hold every password. */}}
{{- define "kvstore.redisAuth" -}}
{{- $r := .Values.redis }}
{{- ternary (ternary $r.bundled.existingSecret $r.auth.existingSecret (eq $r.mode "bundled")) dict .Values.tiers.redis.enabled | toJson }}
{{- end }}

{{- /* Redis' maxmemory: the rest of its container is for buffers. */}}
{{- define "kvstore.redisMemory" -}}
{{- $unit := regexFind "[KMGT]i$" .Values.redis.bundled.memory }}
{{- $number := trimSuffix $unit .Values.redis.bundled.memory | int64 }}
{{- $scale := index (dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776) $unit }}
{{- div (mul $number $scale 3) 4 }}
{{- end }}

{{- define "kvstore.address" -}}
{{- printf "%s.%s.svc:%d" (include "kvstore.fullname" .) .Release.Namespace (int .Values.ports.grpc) }}
{{- end }}

{{- /* The server's settings, for its YAML file. */}}
{{- define "kvstore.settings" -}}
{{- $v := .Values }}
{{- $s := dict "tiers" (include "kvstore.tiers" .) "cpu_size" $v.tiers.cpu.size "log_format" "json" "open_pages" true }}
{{- range $name, $port := dict "listen" $v.ports.grpc "health" $v.ports.health "http" $v.ports.http }}
{{- $_ := set $s $name (printf "0.0.0.0:%d" (int $port)) }}
{{- end }}
{{- $_ := set $s "socket_path" (ternary "/run/kvstore/kvstore.sock" "off" $v.hostSocket.enabled) }}
{{- if $v.tiers.gpu.enabled }}{{ $_ := set $s "gpu" (printf "%s:%d" $v.tiers.gpu.size (int $v.tiers.gpu.device)) }}{{ end }}
{{- if $v.tiers.disk.enabled }}{{ $_ := set $s "disk" (printf "%s:/var/lib/kvstore/disk" $v.tiers.disk.size) }}{{ end }}
{{- if $v.tiers.redis.enabled }}
{{- $_ := set $s "redis_size" $v.tiers.redis.size }}
{{- $_ := set $s "redis_prefix" $v.redis.prefix }}
{{- if include "kvstore.hasDirectory" . }}{{ $_ := set $s "directory" true }}{{ end }}
{{- if eq $v.redis.mode "bundled" }}{{ $_ := set $s "redis_url" (printf "redis://%s:6379/0" (include "kvstore.redisName" .)) }}{{ end }}
{{- if (include "kvstore.redisAuth" . | fromJson).name }}
{{- if $v.redis.auth.username }}{{ $_ := set $s "redis_username" $v.redis.auth.username }}{{ end }}
{{- $_ := set $s "redis_password_file" "/etc/kvstore/redis-auth/password" }}
{{- end }}
{{- if $v.redis.tls.existingSecret }}
{{- $_ := set $s "redis_tls_ca" "/etc/kvstore/redis-tls/ca.crt" }}
{{- if $v.redis.tls.clientCert }}
{{- $_ := set $s "redis_tls_cert" "/etc/kvstore/redis-tls/tls.crt" }}
{{- $_ := set $s "redis_tls_key" "/etc/kvstore/redis-tls/tls.key" }}
{{- end }}
{{- end }}
{{- end }}
{{- if $v.bulk.enabled }}
{{- $_ := set $s "bulk" (printf "0.0.0.0:%d" (int $v.ports.bulk)) }}
{{- end }}
{{- if $v.config.events_readers }}{{ $_ := set $s "events_keys" "/run/kvstore-own/events" }}{{ end }}
{{- if include "kvstore.hasTLS" . }}
{{- $_ := set $s "tls_cert" "/etc/kvstore/tls/tls.crt" }}
{{- $_ := set $s "tls_key" "/etc/kvstore/tls/tls.key" }}
{{- if $v.tls.clientCA }}{{ $_ := set $s "tls_client_ca" "/etc/kvstore/tls/ca.crt" }}{{ end }}
{{- if $v.metrics.tls }}{{ $_ := set $s "http_tls" true }}{{ end }}
{{- if $v.tls.crl.existingSecret.name }}{{ $_ := set $s "tls_crl" "/etc/kvstore/crl/crl.pem" }}{{ end }}
{{- end }}
{{- if $v.auth.existingSecret.name }}{{ $_ := set $s "auth_keys" "/etc/kvstore/auth/keys" }}{{ end }}
{{- if $v.auth.jwt.existingSecret.name }}
{{- $_ := set $s "jwt_key" "/etc/kvstore/jwt/key" }}
{{- $_ := set $s "jwt_algorithm" $v.auth.jwt.algorithm }}
{{- $_ := set $s "jwt_audience" (required "auth.jwt.audience: say whom the tokens are for" $v.auth.jwt.audience) }}
{{- if $v.auth.jwt.issuer }}{{ $_ := set $s "jwt_issuer" $v.auth.jwt.issuer }}{{ end }}
{{- end }}
{{- if $v.encryption.existingSecret.name }}{{ $_ := set $s "encryption_keys" "/etc/kvstore/encryption/keys" }}{{ end }}
{{- if $v.namespaceSalt.existingSecret.name }}{{ $_ := set $s "secret_file" "/etc/kvstore/salt/salt" }}{{ end }}
{{- if $v.peers.existingSecret.name }}{{ $_ := set $s "peer_key" "/etc/kvstore/peer/key" }}{{ end }}
{{- if and $v.config.peers (include "kvstore.hasTLS" .) }}
{{- $_ := set $s "peer_ca" "/etc/kvstore/tls/ca.crt" }}
{{- $_ := set $s "peer_name" (printf "%s.%s.svc" (include "kvstore.fullname" .) .Release.Namespace) }}
{{- end }}
{{- if $v.insecure }}{{ $_ := set $s "insecure" true }}{{ end }}
{{- toYaml (mergeOverwrite $s $v.config) }}
{{- end }}

{{- /* Refuses values with which the server would not start, or would be open to everyone. */}}
{{- define "kvstore.check" -}}
{{- if not .Values.insecure }}
{{- if not (include "kvstore.hasTLS" .) }}{{ fail "tls: name tls.existingSecret or enable tls.certManager; or set insecure: true" }}{{ end }}
{{- if not (include "kvstore.hasAuth" .) }}{{ fail "auth: name auth.existingSecret or auth.jwt.existingSecret, or set tls.clientCA; or set insecure: true" }}{{ end }}
{{- end }}
{{- if and .Values.metrics.tls (not (include "kvstore.hasTLS" .)) }}{{ fail "metrics.tls: needs a certificate; name tls.existingSecret or enable tls.certManager" }}{{ end }}
{{- if and .Values.tls.certManager.enabled (not .Values.tls.certManager.issuerRef.name) }}{{ fail "tls.certManager.issuerRef.name: name the issuer" }}{{ end }}
{{- if and .Values.tls.crl.existingSecret.name (not .Values.tls.clientCA) }}{{ fail "tls.crl: revokes client certificates; set tls.clientCA, or leave it out" }}{{ end }}
{{- if .Values.tiers.redis.enabled }}
{{- if and (eq .Values.redis.mode "external") (not .Values.redis.existingSecret.name) }}{{ fail "redis.existingSecret.name: name the secret with the URL of Redis" }}{{ end }}
{{- if and (eq .Values.redis.mode "bundled") (not .Values.redis.bundled.existingSecret.name) }}{{ fail "redis.bundled.existingSecret.name: name the secret with its password" }}{{ end }}
{{- if and (eq .Values.redis.mode "bundled") (or .Values.redis.auth.existingSecret.name .Values.redis.tls.existingSecret) }}{{ fail "redis.auth, redis.tls: are for an external Redis; leave them out with redis.mode: bundled" }}{{ end }}
{{- if and .Values.redis.auth.username (not .Values.redis.auth.existingSecret.name) }}{{ fail "redis.auth.existingSecret.name: name the secret with the password of redis.auth.username" }}{{ end }}
{{- end }}
{{- if and (eq .Values.tiers.disk.kind "claim") (ne .Values.mode "statefulset") .Values.tiers.disk.enabled }}{{ fail "tiers.disk.kind: a claim belongs to a statefulset; use ephemeral, emptyDir or hostPath" }}{{ end }}
{{- $floor := 268435456 }}
{{- if lt (include "kvstore.bytes" .Values.resources.headroom | int64) $floor }}{{ fail "resources.headroom: the process and copies for readers need 256MiB at least" }}{{ end }}
{{- range $name := list "node_id" "advertise" }}
{{- if hasKey $.Values.config $name }}{{ fail (printf "config.%s: all pods would share it; leave it out, each pod gets its own" $name) }}{{ end }}
{{- end }}
{{- if and .Values.config.directory (not .Values.tiers.redis.enabled) }}{{ fail "config.directory: the directory is in Redis; enable tiers.redis" }}{{ end }}
{{- if .Values.config.peers }}
{{- if and (include "kvstore.hasAuth" .) (not .Values.tls.clientCA) (not .Values.peers.existingSecret.name) }}{{ fail "peers.existingSecret.name: name the secret with the API key of role peer that pods use" }}{{ end }}
{{- if and (include "kvstore.hasTLS" .) (not .Values.tls.hasCA) }}{{ fail "config.peers: pods verify each other with ca.crt; add it to the secret of tls, and set tls.hasCA" }}{{ end }}
{{- end }}
{{- if and .Values.peers.existingSecret.name (not .Values.config.peers) }}{{ fail "peers.existingSecret: is only used with peers; set config.peers, or leave it out" }}{{ end }}
{{- if hasKey .Values.config "bulk" }}{{ fail "config.bulk: set bulk.enabled and ports.bulk, which also open the port" }}{{ end }}
{{- if and (contains "directory" (toString .Values.config.peers)) (not .Values.bulk.enabled) }}{{ fail "config.peers: pods read each other over the bulk channel; set bulk.enabled" }}{{ end }}
{{- if and .Values.hostSocket.enabled (ne .Values.mode "daemonset") }}{{ fail "hostSocket.enabled: engines share memory with a server on their node: use mode: daemonset" }}{{ end }}
{{- end }}
