{{- define "kvstore.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "kvstore.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.user.id }}
runAsGroup: {{ .Values.user.group }}
fsGroup: {{ .Values.user.group }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "kvstore.secretVolume" -}}
- name: {{ .name }}
  secret:
    secretName: {{ .secret.name }}
    defaultMode: 0440
    items:
      - key: {{ .secret.key }}
        path: {{ .path }}
{{- end }}

{{- /* The pod of the server, for either kind of workload. */}}
{{- define "kvstore.pod" -}}
{{- $v := .Values -}}
{{- $redisAuth := include "kvstore.redisAuth" . | fromJson -}}
{{- $hostDisk := and $v.tiers.disk.enabled (eq $v.tiers.disk.kind "hostPath") -}}
metadata:
  labels:
    {{- include "kvstore.labels" . | nindent 4 }}
    app.kubernetes.io/component: server
    {{- with $v.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/config: {{ include "kvstore.settings" . | sha256sum }}
    {{- with $v.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- with $v.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  serviceAccountName: {{ include "kvstore.fullname" . }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  securityContext:
    {{- include "kvstore.podSecurity" . | nindent 4 }}
  terminationGracePeriodSeconds: {{ $v.terminationGracePeriodSeconds }}
  {{- with $v.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $v.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- if and $v.tiers.gpu.enabled $v.hostSocket.enabled }}
  hostIPC: true # CUDA shares device memory between processes of one IPC namespace
  {{- end }}
  {{- if or $v.hostSocket.enabled $hostDisk }}
  initContainers:
    - name: own-folders # the kubelet creates host folders as root
      image: {{ include "kvstore.image" . }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      command: [install, -d, -m, "0700", -o, {{ $v.user.id | quote }}, -g, {{ $v.user.group | quote }}]
      args:
        {{- if $v.hostSocket.enabled }}
        - /run/kvstore
        {{- end }}
        {{- if $hostDisk }}
        - /var/lib/kvstore
        {{- end }}
      securityContext:
        runAsNonRoot: false
        runAsUser: 0
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
          add: [CHOWN, FOWNER, DAC_OVERRIDE]
      resources:
        requests: {cpu: 10m, memory: 32Mi}
        limits: {cpu: 100m, memory: 32Mi}
      volumeMounts:
        {{- if $v.hostSocket.enabled }}
        - {name: run, mountPath: /run/kvstore}
        {{- end }}
        {{- if $hostDisk }}
        - {name: data, mountPath: /var/lib/kvstore}
        {{- end }}
  {{- end }}
  containers:
    - name: kvstore
      image: {{ include "kvstore.image" . }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      command: [kvstore-server]
      args: [--config, /etc/kvstore/config/kvstore.yaml]
      {{- $ownRedis := and $v.tiers.redis.enabled (eq $v.redis.mode "external") }}
      {{- if or $ownRedis (include "kvstore.hasDirectory" .) }}
      env:
        {{- if $ownRedis }}
        - name: KVSTORE_REDIS_URL
          valueFrom:
            secretKeyRef:
              name: {{ $v.redis.existingSecret.name }}
              key: {{ $v.redis.existingSecret.key }}
        {{- end }}
        {{- if include "kvstore.hasDirectory" . }}
        - name: KVSTORE_NODE_ID
          valueFrom:
            fieldRef: {fieldPath: metadata.name}
        - name: KVSTORE_ADVERTISE
          valueFrom:
            fieldRef: {fieldPath: status.podIP}
        {{- end }}
      {{- end }}
      ports:
        - {name: grpc, containerPort: {{ $v.ports.grpc }}}
        {{- if $v.bulk.enabled }}
        - {name: bulk, containerPort: {{ $v.ports.bulk }}}
        {{- end }}
        - {name: health, containerPort: {{ $v.ports.health }}}
        - {name: http, containerPort: {{ $v.ports.http }}}
      startupProbe: # a large disk's index may take a while
        grpc: {port: {{ $v.ports.health }}, service: startup}
        periodSeconds: 2
        failureThreshold: 150
      livenessProbe: # without Redis: a restart does not fix it
        grpc: {port: {{ $v.ports.health }}, service: liveness}
        periodSeconds: 10
        timeoutSeconds: 5
      readinessProbe:
        grpc: {port: {{ $v.ports.health }}, service: readiness}
        periodSeconds: 5
        timeoutSeconds: 5
      {{- if $v.endpointsDelaySeconds }}
      lifecycle:
        preStop: # waits for the removal of endpoints; then SIGTERM drains
          exec:
            command: [sleep, {{ $v.endpointsDelaySeconds | quote }}]
      {{- end }}
      securityContext:
        {{- include "kvstore.restricted" . | nindent 8 }}
      resources:
        requests:
          cpu: {{ $v.resources.cpu }}
          memory: {{ include "kvstore.memory" . }}
          {{- if and $v.tiers.disk.enabled (eq $v.tiers.disk.kind "emptyDir") }}
          ephemeral-storage: {{ include "kvstore.diskSpace" . }}
          {{- end }}
        limits:
          cpu: {{ $v.resources.cpu }}
          memory: {{ include "kvstore.memory" . }}
          {{- if and $v.tiers.disk.enabled (eq $v.tiers.disk.kind "emptyDir") }}
          ephemeral-storage: {{ include "kvstore.diskSpace" . }}
          {{- end }}
          {{- if $v.tiers.gpu.enabled }}
          {{ $v.resources.gpuResource }}: 1
          {{- end }}
      volumeMounts:
        - {name: config, mountPath: /etc/kvstore/config, readOnly: true}
        {{- if $v.hostSocket.enabled }}
        - {name: run, mountPath: /run/kvstore}
        {{- end }}
        - {name: own, mountPath: /run/kvstore-own}
        - {name: tmp, mountPath: /tmp}
        {{- if $v.tiers.disk.enabled }}
        - {name: data, mountPath: /var/lib/kvstore}
        {{- end }}
        {{- if include "kvstore.hasTLS" . }}
        - {name: tls, mountPath: /etc/kvstore/tls, readOnly: true}
        {{- end }}
        {{- if $v.auth.existingSecret.name }}
        - {name: auth, mountPath: /etc/kvstore/auth, readOnly: true}
        {{- end }}
        {{- if $v.auth.jwt.existingSecret.name }}
        - {name: jwt, mountPath: /etc/kvstore/jwt, readOnly: true}
        {{- end }}
        {{- if $redisAuth.name }}
        - {name: redis-auth, mountPath: /etc/kvstore/redis-auth, readOnly: true}
        {{- end }}
        {{- if and $v.tiers.redis.enabled $v.redis.tls.existingSecret }}
        - {name: redis-tls, mountPath: /etc/kvstore/redis-tls, readOnly: true}
        {{- end }}
        {{- if $v.tls.crl.existingSecret.name }}
        - {name: crl, mountPath: /etc/kvstore/crl, readOnly: true}
        {{- end }}
        {{- if $v.encryption.existingSecret.name }}
        - {name: encryption, mountPath: /etc/kvstore/encryption, readOnly: true}
        {{- end }}
        {{- if $v.namespaceSalt.existingSecret.name }}
        - {name: salt, mountPath: /etc/kvstore/salt, readOnly: true}
        {{- end }}
        {{- if $v.peers.existingSecret.name }}
        - {name: peer, mountPath: /etc/kvstore/peer, readOnly: true}
        {{- end }}
  volumes:
    - name: config
      configMap:
        name: {{ include "kvstore.fullname" . }}
    {{- if $v.hostSocket.enabled }}
    - name: run
      hostPath:
        path: {{ $v.hostSocket.path }}
        type: DirectoryOrCreate
    {{- end }}
    - name: own
      emptyDir:
        sizeLimit: 16Mi
    - name: tmp
      emptyDir:
        sizeLimit: 64Mi
    {{- if and $v.tiers.disk.enabled (ne $v.tiers.disk.kind "claim") }}
    - name: data
      {{- if eq $v.tiers.disk.kind "emptyDir" }}
      emptyDir:
        sizeLimit: {{ include "kvstore.diskSpace" . }}
      {{- else if eq $v.tiers.disk.kind "hostPath" }}
      hostPath:
        path: {{ $v.tiers.disk.hostPath }}
        type: DirectoryOrCreate
      {{- else }}
      ephemeral:
        volumeClaimTemplate:
          spec:
            {{- include "kvstore.claim" . | nindent 12 }}
      {{- end }}
    {{- end }}
    {{- if include "kvstore.hasTLS" . }}
    - name: tls
      secret:
        secretName: {{ include "kvstore.tlsSecret" . }}
        defaultMode: 0440
    {{- end }}
    {{- if $v.auth.existingSecret.name }}
    {{- include "kvstore.secretVolume" (dict "name" "auth" "secret" $v.auth.existingSecret "path" "keys") | nindent 4 }}
    {{- end }}
    {{- if $v.auth.jwt.existingSecret.name }}
    {{- include "kvstore.secretVolume" (dict "name" "jwt" "secret" $v.auth.jwt.existingSecret "path" "key") | nindent 4 }}
    {{- end }}
    {{- if $redisAuth.name }}
    {{- include "kvstore.secretVolume" (dict "name" "redis-auth" "secret" $redisAuth "path" "password") | nindent 4 }}
    {{- end }}
    {{- if and $v.tiers.redis.enabled $v.redis.tls.existingSecret }}
    - name: redis-tls
      secret:
        secretName: {{ $v.redis.tls.existingSecret }}
        defaultMode: 0440
    {{- end }}
    {{- if $v.tls.crl.existingSecret.name }}
    {{- include "kvstore.secretVolume" (dict "name" "crl" "secret" $v.tls.crl.existingSecret "path" "crl.pem") | nindent 4 }}
    {{- end }}
    {{- if $v.encryption.existingSecret.name }}
    {{- include "kvstore.secretVolume" (dict "name" "encryption" "secret" $v.encryption.existingSecret "path" "keys") | nindent 4 }}
    {{- end }}
    {{- if $v.namespaceSalt.existingSecret.name }}
    {{- include "kvstore.secretVolume" (dict "name" "salt" "secret" $v.namespaceSalt.existingSecret "path" "salt") | nindent 4 }}
    {{- end }}
    {{- if $v.peers.existingSecret.name }}
    {{- include "kvstore.secretVolume" (dict "name" "peer" "secret" $v.peers.existingSecret "path" "key") | nindent 4 }}
    {{- end }}
  {{- with $v.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if and $v.topologySpread (eq $v.mode "statefulset") }}
  topologySpreadConstraints:
    {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
    - maxSkew: 1
      topologyKey: {{ . }}
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "kvstore.selector" $ | nindent 10 }}
    {{- end }}
  {{- end }}
{{- end }}

{{- define "kvstore.claim" -}}
accessModes: [ReadWriteOnce]
{{- with .Values.tiers.disk.storageClass }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests:
    storage: {{ include "kvstore.diskSpace" . }}
{{- end }}
