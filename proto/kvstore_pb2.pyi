from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Reuse(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REUSE_UNKNOWN: _ClassVar[Reuse]
    REUSE_DISCARD: _ClassVar[Reuse]
    REUSE_KEEP: _ClassVar[Reuse]

class Via(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VIA_STREAM: _ClassVar[Via]
    VIA_SHARED_MEMORY: _ClassVar[Via]
    VIA_DEVICE: _ClassVar[Via]
REUSE_UNKNOWN: Reuse
REUSE_DISCARD: Reuse
REUSE_KEEP: Reuse
VIA_STREAM: Via
VIA_SHARED_MEMORY: Via
VIA_DEVICE: Via

class Server(_message.Message):
    __slots__ = ("boot_id", "features")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    features: int
    def __init__(self, boot_id: _Optional[int] = ..., features: _Optional[int] = ...) -> None: ...

class LayerGroup(_message.Message):
    __slots__ = ("kind", "dtype", "layer_ids", "kv_heads", "head_dim", "window_tokens")
    KIND_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    kind: int
    dtype: int
    layer_ids: _containers.RepeatedScalarFieldContainer[int]
    kv_heads: int
    head_dim: int
    window_tokens: int
    def __init__(self, kind: _Optional[int] = ..., dtype: _Optional[int] = ..., layer_ids: _Optional[_Iterable[int]] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., window_tokens: _Optional[int] = ...) -> None: ...

class RopeFactor(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class Rope(_message.Message):
    __slots__ = ("theta", "rotary_dim", "scaling", "factors")
    THETA_FIELD_NUMBER: _ClassVar[int]
    ROTARY_DIM_FIELD_NUMBER: _ClassVar[int]
    SCALING_FIELD_NUMBER: _ClassVar[int]
    FACTORS_FIELD_NUMBER: _ClassVar[int]
    theta: float
    rotary_dim: int
    scaling: str
    factors: _containers.RepeatedCompositeFieldContainer[RopeFactor]
    def __init__(self, theta: _Optional[float] = ..., rotary_dim: _Optional[int] = ..., scaling: _Optional[str] = ..., factors: _Optional[_Iterable[_Union[RopeFactor, _Mapping]]] = ...) -> None: ...

class Representation(_message.Message):
    __slots__ = ("model_id", "model_revision", "adapter_digest", "quantization", "layer_groups", "rope", "tokenizer_digest", "layout_version")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    LAYER_GROUPS_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    model_revision: str
    adapter_digest: str
    quantization: str
    layer_groups: _containers.RepeatedCompositeFieldContainer[LayerGroup]
    rope: Rope
    tokenizer_digest: str
    layout_version: int
    def __init__(self, model_id: _Optional[str] = ..., model_revision: _Optional[str] = ..., adapter_digest: _Optional[str] = ..., quantization: _Optional[str] = ..., layer_groups: _Optional[_Iterable[_Union[LayerGroup, _Mapping]]] = ..., rope: _Optional[_Union[Rope, _Mapping]] = ..., tokenizer_digest: _Optional[str] = ..., layout_version: _Optional[int] = ...) -> None: ...

class Component(_message.Message):
    __slots__ = ("kind", "dtype", "layers", "kv_heads", "head_dim", "tokens", "chunk_tokens")
    KIND_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    kind: int
    dtype: int
    layers: int
    kv_heads: int
    head_dim: int
    tokens: int
    chunk_tokens: int
    def __init__(self, kind: _Optional[int] = ..., dtype: _Optional[int] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., tokens: _Optional[int] = ..., chunk_tokens: _Optional[int] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("representation", "client", "tenant", "process")
    REPRESENTATION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    representation: Representation
    client: str
    tenant: str
    process: int
    def __init__(self, representation: _Optional[_Union[Representation, _Mapping]] = ..., client: _Optional[str] = ..., tenant: _Optional[str] = ..., process: _Optional[int] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("server", "session_id", "key_namespace", "heartbeat_ms", "max_message_bytes", "max_frame_bytes", "max_batch_chunks", "host_id", "socket_path", "attach_token", "codecs", "arena_device", "arena_bytes", "bulk_address", "bulk_certificate", "peers", "server_pid", "pid_namespace", "weighs")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    SOCKET_PATH_FIELD_NUMBER: _ClassVar[int]
    ATTACH_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    ARENA_DEVICE_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    BULK_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BULK_CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    SERVER_PID_FIELD_NUMBER: _ClassVar[int]
    PID_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    WEIGHS_FIELD_NUMBER: _ClassVar[int]
    server: Server
    session_id: int
    key_namespace: bytes
    heartbeat_ms: int
    max_message_bytes: int
    max_frame_bytes: int
    max_batch_chunks: int
    host_id: str
    socket_path: str
    attach_token: bytes
    codecs: _containers.RepeatedScalarFieldContainer[str]
    arena_device: str
    arena_bytes: int
    bulk_address: str
    bulk_certificate: bytes
    peers: _containers.RepeatedScalarFieldContainer[int]
    server_pid: int
    pid_namespace: int
    weighs: bool
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., session_id: _Optional[int] = ..., key_namespace: _Optional[bytes] = ..., heartbeat_ms: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., max_frame_bytes: _Optional[int] = ..., max_batch_chunks: _Optional[int] = ..., host_id: _Optional[str] = ..., socket_path: _Optional[str] = ..., attach_token: _Optional[bytes] = ..., codecs: _Optional[_Iterable[str]] = ..., arena_device: _Optional[str] = ..., arena_bytes: _Optional[int] = ..., bulk_address: _Optional[str] = ..., bulk_certificate: _Optional[bytes] = ..., peers: _Optional[_Iterable[int]] = ..., server_pid: _Optional[int] = ..., pid_namespace: _Optional[int] = ..., weighs: bool = ...) -> None: ...

class OpenPeerRequest(_message.Message):
    __slots__ = ("node_id",)
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    def __init__(self, node_id: _Optional[str] = ...) -> None: ...

class OpenPeerResponse(_message.Message):
    __slots__ = ("server", "session_id", "attach_token", "heartbeat_ms", "max_frame_bytes", "max_batch_chunks", "bulk_address", "bulk_certificate")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ATTACH_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BULK_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BULK_CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    server: Server
    session_id: int
    attach_token: bytes
    heartbeat_ms: int
    max_frame_bytes: int
    max_batch_chunks: int
    bulk_address: str
    bulk_certificate: bytes
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., session_id: _Optional[int] = ..., attach_token: _Optional[bytes] = ..., heartbeat_ms: _Optional[int] = ..., max_frame_bytes: _Optional[int] = ..., max_batch_chunks: _Optional[int] = ..., bulk_address: _Optional[str] = ..., bulk_certificate: _Optional[bytes] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("session_id", "counts")
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    counts: _containers.ScalarMap[str, int]
    def __init__(self, session_id: _Optional[int] = ..., counts: _Optional[_Mapping[str, int]] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("server", "draining", "peers")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    server: Server
    draining: bool
    peers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., draining: bool = ..., peers: _Optional[_Iterable[int]] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    def __init__(self, session_id: _Optional[int] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ("server",)
    SERVER_FIELD_NUMBER: _ClassVar[int]
    server: Server
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("session_id", "digests", "lease", "deadline_ms", "min_accuracy", "places", "prefill", "wait_ms", "ranges")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    MIN_ACCURACY_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    digests: bytes
    lease: bool
    deadline_ms: int
    min_accuracy: int
    places: bool
    prefill: Prefill
    wait_ms: int
    ranges: bool
    def __init__(self, session_id: _Optional[int] = ..., digests: _Optional[bytes] = ..., lease: bool = ..., deadline_ms: _Optional[int] = ..., min_accuracy: _Optional[int] = ..., places: bool = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ..., wait_ms: _Optional[int] = ..., ranges: bool = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("start_s", "token_s", "pair_s", "tokens")
    START_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PAIR_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    start_s: float
    token_s: float
    pair_s: float
    tokens: int
    def __init__(self, start_s: _Optional[float] = ..., token_s: _Optional[float] = ..., pair_s: _Optional[float] = ..., tokens: _Optional[int] = ...) -> None: ...

class PlanRange(_message.Message):
    __slots__ = ("first", "stop", "load", "ms")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    MS_FIELD_NUMBER: _ClassVar[int]
    first: int
    stop: int
    load: bool
    ms: float
    def __init__(self, first: _Optional[int] = ..., stop: _Optional[int] = ..., load: bool = ..., ms: _Optional[float] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("server", "ready", "pending", "tiers", "tier_names", "lease_id", "lease_ttl_ms", "server_us", "places", "load_us", "plan", "plan_ms", "recompute_ms", "shared")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    TIER_NAMES_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    SERVER_US_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    LOAD_US_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    PLAN_MS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    server: Server
    ready: int
    pending: int
    tiers: bytes
    tier_names: _containers.RepeatedScalarFieldContainer[str]
    lease_id: int
    lease_ttl_ms: int
    server_us: int
    places: bytes
    load_us: bytes
    plan: _containers.RepeatedCompositeFieldContainer[PlanRange]
    plan_ms: float
    recompute_ms: float
    shared: int
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., ready: _Optional[int] = ..., pending: _Optional[int] = ..., tiers: _Optional[bytes] = ..., tier_names: _Optional[_Iterable[str]] = ..., lease_id: _Optional[int] = ..., lease_ttl_ms: _Optional[int] = ..., server_us: _Optional[int] = ..., places: _Optional[bytes] = ..., load_us: _Optional[bytes] = ..., plan: _Optional[_Iterable[_Union[PlanRange, _Mapping]]] = ..., plan_ms: _Optional[float] = ..., recompute_ms: _Optional[float] = ..., shared: _Optional[int] = ...) -> None: ...

class Hints(_message.Message):
    __slots__ = ("reuse", "priority", "ttl_ms", "pin_ms", "category", "prompt_tokens", "handover_ms")
    REUSE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    PIN_MS_FIELD_NUMBER: _ClassVar[int]
    CATEGORY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_MS_FIELD_NUMBER: _ClassVar[int]
    reuse: Reuse
    priority: int
    ttl_ms: int
    pin_ms: int
    category: str
    prompt_tokens: int
    handover_ms: int
    def __init__(self, reuse: _Optional[_Union[Reuse, str]] = ..., priority: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., pin_ms: _Optional[int] = ..., category: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., handover_ms: _Optional[int] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("session_id", "digests", "lease_id", "deadline_ms", "via", "min_accuracy", "layer_major", "ranges", "skip_rows", "peers", "no_lease", "key_namespace")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    VIA_FIELD_NUMBER: _ClassVar[int]
    MIN_ACCURACY_FIELD_NUMBER: _ClassVar[int]
    LAYER_MAJOR_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    SKIP_ROWS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    NO_LEASE_FIELD_NUMBER: _ClassVar[int]
    KEY_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    digests: bytes
    lease_id: int
    deadline_ms: int
    via: Via
    min_accuracy: int
    layer_major: bool
    ranges: _containers.RepeatedCompositeFieldContainer[FrameRange]
    skip_rows: bytes
    peers: _containers.RepeatedScalarFieldContainer[int]
    no_lease: bool
    key_namespace: bytes
    def __init__(self, session_id: _Optional[int] = ..., digests: _Optional[bytes] = ..., lease_id: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., via: _Optional[_Union[Via, str]] = ..., min_accuracy: _Optional[int] = ..., layer_major: bool = ..., ranges: _Optional[_Iterable[_Union[FrameRange, _Mapping]]] = ..., skip_rows: _Optional[bytes] = ..., peers: _Optional[_Iterable[int]] = ..., no_lease: bool = ..., key_namespace: _Optional[bytes] = ...) -> None: ...

class FrameRange(_message.Message):
    __slots__ = ("index", "start", "stop")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    index: int
    start: int
    stop: int
    def __init__(self, index: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class Places(_message.Message):
    __slots__ = ("rows", "tier_names", "peers")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TIER_NAMES_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    tier_names: _containers.RepeatedScalarFieldContainer[str]
    peers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, rows: _Optional[bytes] = ..., tier_names: _Optional[_Iterable[str]] = ..., peers: _Optional[_Iterable[int]] = ...) -> None: ...

class FramePart(_message.Message):
    __slots__ = ("frame_bytes", "offset", "data")
    FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    frame_bytes: int
    offset: int
    data: bytes
    def __init__(self, frame_bytes: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("server", "lease_id", "index", "tier", "places", "part")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    server: Server
    lease_id: int
    index: int
    tier: str
    places: Places
    part: FramePart
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., lease_id: _Optional[int] = ..., index: _Optional[int] = ..., tier: _Optional[str] = ..., places: _Optional[_Union[Places, _Mapping]] = ..., part: _Optional[_Union[FramePart, _Mapping]] = ...) -> None: ...

class LendPeerRequest(_message.Message):
    __slots__ = ("session_id", "number")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    number: int
    def __init__(self, session_id: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class LendPeerResponse(_message.Message):
    __slots__ = ("server", "bulk_address", "bulk_certificate", "session_id", "until_s", "token", "valid_ms")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    BULK_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BULK_CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    UNTIL_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    VALID_MS_FIELD_NUMBER: _ClassVar[int]
    server: Server
    bulk_address: str
    bulk_certificate: bytes
    session_id: int
    until_s: int
    token: bytes
    valid_ms: int
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., bulk_address: _Optional[str] = ..., bulk_certificate: _Optional[bytes] = ..., session_id: _Optional[int] = ..., until_s: _Optional[int] = ..., token: _Optional[bytes] = ..., valid_ms: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("session_id", "lease_ids", "hints")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    hints: Hints
    def __init__(self, session_id: _Optional[int] = ..., lease_ids: _Optional[_Iterable[int]] = ..., hints: _Optional[_Union[Hints, _Mapping]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("server", "released")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    server: Server
    released: int
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., released: _Optional[int] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("session_id", "frame_bytes", "data", "durable", "deadline_ms", "hints")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    frame_bytes: int
    data: bytes
    durable: bool
    deadline_ms: int
    hints: Hints
    def __init__(self, session_id: _Optional[int] = ..., frame_bytes: _Optional[int] = ..., data: _Optional[bytes] = ..., durable: bool = ..., deadline_ms: _Optional[int] = ..., hints: _Optional[_Union[Hints, _Mapping]] = ...) -> None: ...

class PutResponse(_message.Message):
    __slots__ = ("server", "outcomes", "reasons")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    server: Server
    outcomes: bytes
    reasons: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., outcomes: _Optional[bytes] = ..., reasons: _Optional[_Iterable[str]] = ...) -> None: ...

class StreamMessage(_message.Message):
    __slots__ = ("request", "attach", "ready", "get", "cancel", "find", "put", "finish", "part", "done", "found", "stored", "failed")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    GET_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    FIND_FIELD_NUMBER: _ClassVar[int]
    PUT_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    request: int
    attach: StreamAttach
    ready: bool
    get: GetRequest
    cancel: bool
    find: FindRequest
    put: PutRequest
    finish: int
    part: StreamPart
    done: int
    found: FindResponse
    stored: PutResponse
    failed: StreamError
    def __init__(self, request: _Optional[int] = ..., attach: _Optional[_Union[StreamAttach, _Mapping]] = ..., ready: bool = ..., get: _Optional[_Union[GetRequest, _Mapping]] = ..., cancel: bool = ..., find: _Optional[_Union[FindRequest, _Mapping]] = ..., put: _Optional[_Union[PutRequest, _Mapping]] = ..., finish: _Optional[int] = ..., part: _Optional[_Union[StreamPart, _Mapping]] = ..., done: _Optional[int] = ..., found: _Optional[_Union[FindResponse, _Mapping]] = ..., stored: _Optional[_Union[PutResponse, _Mapping]] = ..., failed: _Optional[_Union[StreamError, _Mapping]] = ...) -> None: ...

class StreamAttach(_message.Message):
    __slots__ = ("session_id", "token", "key_namespace", "until_s")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    KEY_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_S_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    token: bytes
    key_namespace: bytes
    until_s: int
    def __init__(self, session_id: _Optional[int] = ..., token: _Optional[bytes] = ..., key_namespace: _Optional[bytes] = ..., until_s: _Optional[int] = ...) -> None: ...

class StreamPart(_message.Message):
    __slots__ = ("index", "frame_bytes", "offset", "tier")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    index: int
    frame_bytes: int
    offset: int
    tier: str
    def __init__(self, index: _Optional[int] = ..., frame_bytes: _Optional[int] = ..., offset: _Optional[int] = ..., tier: _Optional[str] = ...) -> None: ...

class StreamError(_message.Message):
    __slots__ = ("name", "text")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    name: str
    text: str
    def __init__(self, name: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class FindRequest(_message.Message):
    __slots__ = ("session_id", "key_namespace", "digests", "deadline_ms")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    key_namespace: bytes
    digests: bytes
    deadline_ms: int
    def __init__(self, session_id: _Optional[int] = ..., key_namespace: _Optional[bytes] = ..., digests: _Optional[bytes] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class FindResponse(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, rows: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("session_id", "digests", "parents", "frame_bytes", "layout", "layouts", "deadline_ms", "durable", "hints")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    digests: bytes
    parents: bytes
    frame_bytes: _containers.RepeatedScalarFieldContainer[int]
    layout: _containers.RepeatedScalarFieldContainer[int]
    layouts: _containers.RepeatedCompositeFieldContainer[Layout]
    deadline_ms: int
    durable: bool
    hints: Hints
    def __init__(self, session_id: _Optional[int] = ..., digests: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., frame_bytes: _Optional[_Iterable[int]] = ..., layout: _Optional[_Iterable[int]] = ..., layouts: _Optional[_Iterable[_Union[Layout, _Mapping]]] = ..., deadline_ms: _Optional[int] = ..., durable: bool = ..., hints: _Optional[_Union[Hints, _Mapping]] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("components", "extents")
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    components: _containers.RepeatedCompositeFieldContainer[Component]
    extents: _containers.RepeatedCompositeFieldContainer[Extent]
    def __init__(self, components: _Optional[_Iterable[_Union[Component, _Mapping]]] = ..., extents: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ...) -> None: ...

class Extent(_message.Message):
    __slots__ = ("first_layer", "layer_stop", "first_head", "head_stop")
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAYER_STOP_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    HEAD_STOP_FIELD_NUMBER: _ClassVar[int]
    first_layer: int
    layer_stop: int
    first_head: int
    head_stop: int
    def __init__(self, first_layer: _Optional[int] = ..., layer_stop: _Optional[int] = ..., first_head: _Optional[int] = ..., head_stop: _Optional[int] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("server", "outcomes", "reservation_ids", "reasons")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_IDS_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    server: Server
    outcomes: bytes
    reservation_ids: _containers.RepeatedScalarFieldContainer[int]
    reasons: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., outcomes: _Optional[bytes] = ..., reservation_ids: _Optional[_Iterable[int]] = ..., reasons: _Optional[_Iterable[str]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("session_id", "reservation_ids", "offsets", "durable", "deadline_ms")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_IDS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    reservation_ids: _containers.RepeatedScalarFieldContainer[int]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    durable: bool
    deadline_ms: int
    def __init__(self, session_id: _Optional[int] = ..., reservation_ids: _Optional[_Iterable[int]] = ..., offsets: _Optional[_Iterable[int]] = ..., durable: bool = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("server", "outcomes", "reasons")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    server: Server
    outcomes: bytes
    reasons: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., outcomes: _Optional[bytes] = ..., reasons: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("session_id", "reservation_ids")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_IDS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    reservation_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[int] = ..., reservation_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("server", "aborted")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    server: Server
    aborted: int
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., aborted: _Optional[int] = ...) -> None: ...

class PutDeviceRequest(_message.Message):
    __slots__ = ("session_id", "headers", "offsets", "event", "deadline_ms", "hints")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    headers: _containers.RepeatedScalarFieldContainer[bytes]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    event: bytes
    deadline_ms: int
    hints: Hints
    def __init__(self, session_id: _Optional[int] = ..., headers: _Optional[_Iterable[bytes]] = ..., offsets: _Optional[_Iterable[int]] = ..., event: _Optional[bytes] = ..., deadline_ms: _Optional[int] = ..., hints: _Optional[_Union[Hints, _Mapping]] = ...) -> None: ...

class AnnouncePutsRequest(_message.Message):
    __slots__ = ("session_id", "digests", "ttl_ms")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    digests: bytes
    ttl_ms: int
    def __init__(self, session_id: _Optional[int] = ..., digests: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class AnnouncePutsResponse(_message.Message):
    __slots__ = ("server", "pending")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    server: Server
    pending: int
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., pending: _Optional[int] = ...) -> None: ...

class WeighRequest(_message.Message):
    __slots__ = ("session_id", "digests", "weights")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    digests: bytes
    weights: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, session_id: _Optional[int] = ..., digests: _Optional[bytes] = ..., weights: _Optional[_Iterable[bytes]] = ...) -> None: ...

class WeighResponse(_message.Message):
    __slots__ = ("server",)
    SERVER_FIELD_NUMBER: _ClassVar[int]
    server: Server
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("session_id", "digests", "ttl_ms")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    digests: bytes
    ttl_ms: int
    def __init__(self, session_id: _Optional[int] = ..., digests: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("server", "pinned")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    server: Server
    pinned: int
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., pinned: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("session_id", "digests")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    digests: bytes
    def __init__(self, session_id: _Optional[int] = ..., digests: _Optional[bytes] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("server", "unpinned")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    UNPINNED_FIELD_NUMBER: _ClassVar[int]
    server: Server
    unpinned: int
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., unpinned: _Optional[int] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("session_id", "digests", "if_damaged")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    IF_DAMAGED_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    digests: bytes
    if_damaged: bool
    def __init__(self, session_id: _Optional[int] = ..., digests: _Optional[bytes] = ..., if_damaged: bool = ...) -> None: ...

class DeleteResponse(_message.Message):
    __slots__ = ("server", "deleted", "leased")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    server: Server
    deleted: int
    leased: int
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., deleted: _Optional[int] = ..., leased: _Optional[int] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("session_id", "tenant", "tier", "dry_run", "deadline_ms")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    tenant: str
    tier: str
    dry_run: bool
    deadline_ms: int
    def __init__(self, session_id: _Optional[int] = ..., tenant: _Optional[str] = ..., tier: _Optional[str] = ..., dry_run: bool = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class ClearResponse(_message.Message):
    __slots__ = ("server", "deleted", "leased", "deleted_bytes", "left")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    DELETED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    server: Server
    deleted: int
    leased: int
    deleted_bytes: int
    left: int
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., deleted: _Optional[int] = ..., leased: _Optional[int] = ..., deleted_bytes: _Optional[int] = ..., left: _Optional[int] = ...) -> None: ...

class StatRequest(_message.Message):
    __slots__ = ("session_id", "digests", "ranks")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    digests: bytes
    ranks: bool
    def __init__(self, session_id: _Optional[int] = ..., digests: _Optional[bytes] = ..., ranks: bool = ...) -> None: ...

class Copy(_message.Message):
    __slots__ = ("tier", "codec", "size_bytes", "accuracy", "before", "at_least", "policy")
    TIER_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AT_LEAST_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    tier: str
    codec: str
    size_bytes: int
    accuracy: int
    before: int
    at_least: bool
    policy: str
    def __init__(self, tier: _Optional[str] = ..., codec: _Optional[str] = ..., size_bytes: _Optional[int] = ..., accuracy: _Optional[int] = ..., before: _Optional[int] = ..., at_least: bool = ..., policy: _Optional[str] = ...) -> None: ...

class ChunkStat(_message.Message):
    __slots__ = ("digest", "parent", "tokens", "raw_bytes", "copies", "leases", "pinned", "hits", "idle_s", "pinned_s", "expires_s", "priority", "context_tokens", "components")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    PINNED_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_S_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    parent: bytes
    tokens: int
    raw_bytes: int
    copies: _containers.RepeatedCompositeFieldContainer[Copy]
    leases: int
    pinned: bool
    hits: int
    idle_s: float
    pinned_s: float
    expires_s: float
    priority: int
    context_tokens: int
    components: _containers.RepeatedCompositeFieldContainer[Component]
    def __init__(self, digest: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., tokens: _Optional[int] = ..., raw_bytes: _Optional[int] = ..., copies: _Optional[_Iterable[_Union[Copy, _Mapping]]] = ..., leases: _Optional[int] = ..., pinned: bool = ..., hits: _Optional[int] = ..., idle_s: _Optional[float] = ..., pinned_s: _Optional[float] = ..., expires_s: _Optional[float] = ..., priority: _Optional[int] = ..., context_tokens: _Optional[int] = ..., components: _Optional[_Iterable[_Union[Component, _Mapping]]] = ...) -> None: ...

class StatResponse(_message.Message):
    __slots__ = ("server", "chunks")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    server: Server
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkStat]
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., chunks: _Optional[_Iterable[_Union[ChunkStat, _Mapping]]] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("session_id", "limit", "after", "prefix")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    limit: int
    after: bytes
    prefix: bytes
    def __init__(self, session_id: _Optional[int] = ..., limit: _Optional[int] = ..., after: _Optional[bytes] = ..., prefix: _Optional[bytes] = ...) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("server", "chunks")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    server: Server
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkStat]
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., chunks: _Optional[_Iterable[_Union[ChunkStat, _Mapping]]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("with_sessions",)
    WITH_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    with_sessions: bool
    def __init__(self, with_sessions: bool = ...) -> None: ...

class TierStatus(_message.Message):
    __slots__ = ("name", "capacity_bytes", "used_bytes", "chunks", "codec", "state", "reason", "policy", "what_if", "partitions")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    WHAT_IF_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    capacity_bytes: int
    used_bytes: int
    chunks: int
    codec: str
    state: str
    reason: str
    policy: str
    what_if: _containers.RepeatedCompositeFieldContainer[SizeRatio]
    partitions: _containers.RepeatedCompositeFieldContainer[PartitionStatus]
    def __init__(self, name: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., chunks: _Optional[int] = ..., codec: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., policy: _Optional[str] = ..., what_if: _Optional[_Iterable[_Union[SizeRatio, _Mapping]]] = ..., partitions: _Optional[_Iterable[_Union[PartitionStatus, _Mapping]]] = ...) -> None: ...

class SizeRatio(_message.Message):
    __slots__ = ("scale", "hit_ratio")
    SCALE_FIELD_NUMBER: _ClassVar[int]
    HIT_RATIO_FIELD_NUMBER: _ClassVar[int]
    scale: float
    hit_ratio: float
    def __init__(self, scale: _Optional[float] = ..., hit_ratio: _Optional[float] = ...) -> None: ...

class PartitionStatus(_message.Message):
    __slots__ = ("name", "used_bytes", "quota_bytes", "guaranteed_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    GUARANTEED_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    used_bytes: int
    quota_bytes: int
    guaranteed_bytes: int
    def __init__(self, name: _Optional[str] = ..., used_bytes: _Optional[int] = ..., quota_bytes: _Optional[int] = ..., guaranteed_bytes: _Optional[int] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("server", "version", "state", "uptime_s", "tiers", "sessions", "leases", "counters", "socket_path", "ghosts", "gates", "directory", "session_list")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SERVER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    SOCKET_PATH_FIELD_NUMBER: _ClassVar[int]
    GHOSTS_FIELD_NUMBER: _ClassVar[int]
    GATES_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    SESSION_LIST_FIELD_NUMBER: _ClassVar[int]
    server: Server
    version: str
    state: str
    uptime_s: float
    tiers: _containers.RepeatedCompositeFieldContainer[TierStatus]
    sessions: int
    leases: int
    counters: _containers.ScalarMap[str, int]
    socket_path: str
    ghosts: int
    gates: _containers.RepeatedCompositeFieldContainer[Gate]
    directory: Directory
    session_list: _containers.RepeatedCompositeFieldContainer[SessionStatus]
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., version: _Optional[str] = ..., state: _Optional[str] = ..., uptime_s: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., sessions: _Optional[int] = ..., leases: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., socket_path: _Optional[str] = ..., ghosts: _Optional[int] = ..., gates: _Optional[_Iterable[_Union[Gate, _Mapping]]] = ..., directory: _Optional[_Union[Directory, _Mapping]] = ..., session_list: _Optional[_Iterable[_Union[SessionStatus, _Mapping]]] = ...) -> None: ...

class SessionStatus(_message.Message):
    __slots__ = ("client", "tenant", "owner", "model_id", "key_namespace", "open_s", "idle_s", "leases", "is_peer")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    OPEN_S_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    IS_PEER_FIELD_NUMBER: _ClassVar[int]
    client: str
    tenant: str
    owner: str
    model_id: str
    key_namespace: bytes
    open_s: float
    idle_s: float
    leases: int
    is_peer: bool
    def __init__(self, client: _Optional[str] = ..., tenant: _Optional[str] = ..., owner: _Optional[str] = ..., model_id: _Optional[str] = ..., key_namespace: _Optional[bytes] = ..., open_s: _Optional[float] = ..., idle_s: _Optional[float] = ..., leases: _Optional[int] = ..., is_peer: bool = ...) -> None: ...

class Directory(_message.Message):
    __slots__ = ("node_id", "incarnation", "standing", "failure", "announced", "waiting", "nodes")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    standing: str
    failure: str
    announced: int
    waiting: int
    nodes: _containers.RepeatedCompositeFieldContainer[DirectoryNode]
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., standing: _Optional[str] = ..., failure: _Optional[str] = ..., announced: _Optional[int] = ..., waiting: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[DirectoryNode, _Mapping]]] = ...) -> None: ...

class DirectoryNode(_message.Message):
    __slots__ = ("node_id", "incarnation", "grpc_address", "bulk_address")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BULK_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    grpc_address: str
    bulk_address: str
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., grpc_address: _Optional[str] = ..., bulk_address: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("deadline_ms",)
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    deadline_ms: int
    def __init__(self, deadline_ms: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("server", "clean")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    CLEAN_FIELD_NUMBER: _ClassVar[int]
    server: Server
    clean: bool
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., clean: bool = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("recording", "after")
    RECORDING_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    recording: int
    after: int
    def __init__(self, recording: _Optional[int] = ..., after: _Optional[int] = ...) -> None: ...

class TraceRecord(_message.Message):
    __slots__ = ("at_us", "chunks", "ready", "tokens")
    AT_US_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    at_us: int
    chunks: bytes
    ready: int
    tokens: int
    def __init__(self, at_us: _Optional[int] = ..., chunks: _Optional[bytes] = ..., ready: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class TraceResponse(_message.Message):
    __slots__ = ("server", "recording", "records", "last", "lost")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    RECORDING_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    server: Server
    recording: int
    records: _containers.RepeatedCompositeFieldContainer[TraceRecord]
    last: int
    lost: int
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., recording: _Optional[int] = ..., records: _Optional[_Iterable[_Union[TraceRecord, _Mapping]]] = ..., last: _Optional[int] = ..., lost: _Optional[int] = ...) -> None: ...

class PromptSegment(_message.Message):
    __slots__ = ("start", "stop", "chains", "contents", "tokens", "approximate")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    APPROXIMATE_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    chains: bytes
    contents: bytes
    tokens: _containers.RepeatedScalarFieldContainer[int]
    approximate: bool
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ..., chains: _Optional[bytes] = ..., contents: _Optional[bytes] = ..., tokens: _Optional[_Iterable[int]] = ..., approximate: bool = ...) -> None: ...

class ResolveRequest(_message.Message):
    __slots__ = ("session_id", "segments", "tag", "trial", "deadline_ms", "min_accuracy", "max_variants", "prefill")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    TRIAL_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    MIN_ACCURACY_FIELD_NUMBER: _ClassVar[int]
    MAX_VARIANTS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    segments: _containers.RepeatedCompositeFieldContainer[PromptSegment]
    tag: str
    trial: bool
    deadline_ms: int
    min_accuracy: int
    max_variants: int
    prefill: Prefill
    def __init__(self, session_id: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[PromptSegment, _Mapping]]] = ..., tag: _Optional[str] = ..., trial: bool = ..., deadline_ms: _Optional[int] = ..., min_accuracy: _Optional[int] = ..., max_variants: _Optional[int] = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ...) -> None: ...

class Variant(_message.Message):
    __slots__ = ("digest", "parent", "position", "tier", "load_ms", "size_bytes", "accuracy", "context_impact", "overlap", "fix_overhead", "deviation", "reports")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    LOAD_MS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_IMPACT_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_FIELD_NUMBER: _ClassVar[int]
    FIX_OVERHEAD_FIELD_NUMBER: _ClassVar[int]
    DEVIATION_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    parent: bytes
    position: int
    tier: int
    load_ms: float
    size_bytes: int
    accuracy: int
    context_impact: float
    overlap: float
    fix_overhead: float
    deviation: float
    reports: int
    def __init__(self, digest: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., position: _Optional[int] = ..., tier: _Optional[int] = ..., load_ms: _Optional[float] = ..., size_bytes: _Optional[int] = ..., accuracy: _Optional[int] = ..., context_impact: _Optional[float] = ..., overlap: _Optional[float] = ..., fix_overhead: _Optional[float] = ..., deviation: _Optional[float] = ..., reports: _Optional[int] = ...) -> None: ...

class ResolvedChunk(_message.Message):
    __slots__ = ("exact", "variants", "priority")
    EXACT_FIELD_NUMBER: _ClassVar[int]
    VARIANTS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    exact: bool
    variants: _containers.RepeatedCompositeFieldContainer[Variant]
    priority: bytes
    def __init__(self, exact: bool = ..., variants: _Optional[_Iterable[_Union[Variant, _Mapping]]] = ..., priority: _Optional[bytes] = ...) -> None: ...

class ResolvedSegment(_message.Message):
    __slots__ = ("chunks", "ratio", "load_ms", "recompute_ms")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    LOAD_MS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[ResolvedChunk]
    ratio: float
    load_ms: float
    recompute_ms: float
    def __init__(self, chunks: _Optional[_Iterable[_Union[ResolvedChunk, _Mapping]]] = ..., ratio: _Optional[float] = ..., load_ms: _Optional[float] = ..., recompute_ms: _Optional[float] = ...) -> None: ...

class Gate(_message.Message):
    __slots__ = ("model", "tag", "open", "ratio", "agreement", "divergence", "shadows", "why", "calibrated", "speedup", "let_through", "kept_out", "codecs")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    DIVERGENCE_FIELD_NUMBER: _ClassVar[int]
    SHADOWS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    CALIBRATED_FIELD_NUMBER: _ClassVar[int]
    SPEEDUP_FIELD_NUMBER: _ClassVar[int]
    LET_THROUGH_FIELD_NUMBER: _ClassVar[int]
    KEPT_OUT_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    model: str
    tag: str
    open: bool
    ratio: float
    agreement: float
    divergence: float
    shadows: int
    why: str
    calibrated: bool
    speedup: float
    let_through: int
    kept_out: int
    codecs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., tag: _Optional[str] = ..., open: bool = ..., ratio: _Optional[float] = ..., agreement: _Optional[float] = ..., divergence: _Optional[float] = ..., shadows: _Optional[int] = ..., why: _Optional[str] = ..., calibrated: bool = ..., speedup: _Optional[float] = ..., let_through: _Optional[int] = ..., kept_out: _Optional[int] = ..., codecs: _Optional[_Iterable[str]] = ...) -> None: ...

class ResolveResponse(_message.Message):
    __slots__ = ("server", "segments", "exact_prefix", "lease_id", "lease_ttl_ms", "layer_order", "tier_names", "rope", "gate", "shadow", "server_us")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    EXACT_PREFIX_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    LAYER_ORDER_FIELD_NUMBER: _ClassVar[int]
    TIER_NAMES_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    GATE_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    SERVER_US_FIELD_NUMBER: _ClassVar[int]
    server: Server
    segments: _containers.RepeatedCompositeFieldContainer[ResolvedSegment]
    exact_prefix: int
    lease_id: int
    lease_ttl_ms: int
    layer_order: _containers.RepeatedScalarFieldContainer[int]
    tier_names: _containers.RepeatedScalarFieldContainer[str]
    rope: Rope
    gate: Gate
    shadow: bool
    server_us: int
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., segments: _Optional[_Iterable[_Union[ResolvedSegment, _Mapping]]] = ..., exact_prefix: _Optional[int] = ..., lease_id: _Optional[int] = ..., lease_ttl_ms: _Optional[int] = ..., layer_order: _Optional[_Iterable[int]] = ..., tier_names: _Optional[_Iterable[str]] = ..., rope: _Optional[_Union[Rope, _Mapping]] = ..., gate: _Optional[_Union[Gate, _Mapping]] = ..., shadow: bool = ..., server_us: _Optional[int] = ...) -> None: ...

class ContextMass(_message.Message):
    __slots__ = ("content", "tokens", "mass")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MASS_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    tokens: int
    mass: float
    def __init__(self, content: _Optional[bytes] = ..., tokens: _Optional[int] = ..., mass: _Optional[float] = ...) -> None: ...

class ChunkReport(_message.Message):
    __slots__ = ("digest", "layer", "deviations", "selected", "query_attention", "context", "intra_mass")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    DEVIATIONS_FIELD_NUMBER: _ClassVar[int]
    SELECTED_FIELD_NUMBER: _ClassVar[int]
    QUERY_ATTENTION_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    INTRA_MASS_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    layer: int
    deviations: bytes
    selected: bytes
    query_attention: bytes
    context: _containers.RepeatedCompositeFieldContainer[ContextMass]
    intra_mass: float
    def __init__(self, digest: _Optional[bytes] = ..., layer: _Optional[int] = ..., deviations: _Optional[bytes] = ..., selected: _Optional[bytes] = ..., query_attention: _Optional[bytes] = ..., context: _Optional[_Iterable[_Union[ContextMass, _Mapping]]] = ..., intra_mass: _Optional[float] = ...) -> None: ...

class ShadowResult(_message.Message):
    __slots__ = ("divergence", "agreement", "tokens")
    DIVERGENCE_FIELD_NUMBER: _ClassVar[int]
    AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    divergence: float
    agreement: float
    tokens: int
    def __init__(self, divergence: _Optional[float] = ..., agreement: _Optional[float] = ..., tokens: _Optional[int] = ...) -> None: ...

class ReportReuseRequest(_message.Message):
    __slots__ = ("session_id", "tag", "chunks", "ratio", "load_ms", "compute_ms", "full_ms", "shadow")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    LOAD_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    FULL_MS_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    tag: str
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkReport]
    ratio: float
    load_ms: float
    compute_ms: float
    full_ms: float
    shadow: ShadowResult
    def __init__(self, session_id: _Optional[int] = ..., tag: _Optional[str] = ..., chunks: _Optional[_Iterable[_Union[ChunkReport, _Mapping]]] = ..., ratio: _Optional[float] = ..., load_ms: _Optional[float] = ..., compute_ms: _Optional[float] = ..., full_ms: _Optional[float] = ..., shadow: _Optional[_Union[ShadowResult, _Mapping]] = ...) -> None: ...

class ReportReuseResponse(_message.Message):
    __slots__ = ("server", "gate")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    GATE_FIELD_NUMBER: _ClassVar[int]
    server: Server
    gate: Gate
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., gate: _Optional[_Union[Gate, _Mapping]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("session_id", "key_namespace", "digests", "min_accuracy", "recent")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    MIN_ACCURACY_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    key_namespace: bytes
    digests: bytes
    min_accuracy: int
    recent: int
    def __init__(self, session_id: _Optional[int] = ..., key_namespace: _Optional[bytes] = ..., digests: _Optional[bytes] = ..., min_accuracy: _Optional[int] = ..., recent: _Optional[int] = ...) -> None: ...

class ChunkReason(_message.Message):
    __slots__ = ("digest", "state", "reason", "copies")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    state: str
    reason: str
    copies: _containers.RepeatedCompositeFieldContainer[Copy]
    def __init__(self, digest: _Optional[bytes] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., copies: _Optional[_Iterable[_Union[Copy, _Mapping]]] = ...) -> None: ...

class Difference(_message.Message):
    __slots__ = ("field", "stored", "asked")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    field: str
    stored: str
    asked: str
    def __init__(self, field: _Optional[str] = ..., stored: _Optional[str] = ..., asked: _Optional[str] = ...) -> None: ...

class KnownSpace(_message.Message):
    __slots__ = ("key_namespace", "representation", "client", "chunks", "differences", "same_tokens", "tenant")
    KEY_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    REPRESENTATION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    SAME_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    key_namespace: bytes
    representation: Representation
    client: str
    chunks: int
    differences: _containers.RepeatedCompositeFieldContainer[Difference]
    same_tokens: bool
    tenant: str
    def __init__(self, key_namespace: _Optional[bytes] = ..., representation: _Optional[_Union[Representation, _Mapping]] = ..., client: _Optional[str] = ..., chunks: _Optional[int] = ..., differences: _Optional[_Iterable[_Union[Difference, _Mapping]]] = ..., same_tokens: bool = ..., tenant: _Optional[str] = ...) -> None: ...

class Miss(_message.Message):
    __slots__ = ("ago_s", "client", "model_id", "chunks", "ready", "pending", "state", "reason")
    AGO_S_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ago_s: float
    client: str
    model_id: str
    chunks: int
    ready: int
    pending: int
    state: str
    reason: str
    def __init__(self, ago_s: _Optional[float] = ..., client: _Optional[str] = ..., model_id: _Optional[str] = ..., chunks: _Optional[int] = ..., ready: _Optional[int] = ..., pending: _Optional[int] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class EngineReport(_message.Message):
    __slots__ = ("ago_s", "client", "model_id", "counts")
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    AGO_S_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    ago_s: float
    client: str
    model_id: str
    counts: _containers.ScalarMap[str, int]
    def __init__(self, ago_s: _Optional[float] = ..., client: _Optional[str] = ..., model_id: _Optional[str] = ..., counts: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("server", "hit_chunks", "chunks", "near", "recent", "engines", "gates", "left_out")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    HIT_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NEAR_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    GATES_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    server: Server
    hit_chunks: int
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkReason]
    near: _containers.RepeatedCompositeFieldContainer[KnownSpace]
    recent: _containers.RepeatedCompositeFieldContainer[Miss]
    engines: _containers.RepeatedCompositeFieldContainer[EngineReport]
    gates: _containers.RepeatedCompositeFieldContainer[Gate]
    left_out: int
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., hit_chunks: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[ChunkReason, _Mapping]]] = ..., near: _Optional[_Iterable[_Union[KnownSpace, _Mapping]]] = ..., recent: _Optional[_Iterable[_Union[Miss, _Mapping]]] = ..., engines: _Optional[_Iterable[_Union[EngineReport, _Mapping]]] = ..., gates: _Optional[_Iterable[_Union[Gate, _Mapping]]] = ..., left_out: _Optional[int] = ...) -> None: ...

class QuotaRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class TierQuota(_message.Message):
    __slots__ = ("tier", "used_bytes", "quota_bytes", "guaranteed_bytes", "used_chunks")
    TIER_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    GUARANTEED_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    tier: str
    used_bytes: int
    quota_bytes: int
    guaranteed_bytes: int
    used_chunks: int
    def __init__(self, tier: _Optional[str] = ..., used_bytes: _Optional[int] = ..., quota_bytes: _Optional[int] = ..., guaranteed_bytes: _Optional[int] = ..., used_chunks: _Optional[int] = ...) -> None: ...

class TenantQuota(_message.Message):
    __slots__ = ("tenant", "tiers", "chunks", "requests_per_s", "leases", "used_leases")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    USED_LEASES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    tiers: _containers.RepeatedCompositeFieldContainer[TierQuota]
    chunks: int
    requests_per_s: int
    leases: int
    used_leases: int
    def __init__(self, tenant: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[TierQuota, _Mapping]]] = ..., chunks: _Optional[int] = ..., requests_per_s: _Optional[int] = ..., leases: _Optional[int] = ..., used_leases: _Optional[int] = ...) -> None: ...

class QuotaResponse(_message.Message):
    __slots__ = ("server", "tenants")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    server: Server
    tenants: _containers.RepeatedCompositeFieldContainer[TenantQuota]
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., tenants: _Optional[_Iterable[_Union[TenantQuota, _Mapping]]] = ...) -> None: ...

class SetQuotaRequest(_message.Message):
    __slots__ = ("tenant", "tier", "quota_bytes", "guaranteed_bytes", "chunks", "requests_per_s", "leases")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    GUARANTEED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    tier: str
    quota_bytes: int
    guaranteed_bytes: int
    chunks: int
    requests_per_s: int
    leases: int
    def __init__(self, tenant: _Optional[str] = ..., tier: _Optional[str] = ..., quota_bytes: _Optional[int] = ..., guaranteed_bytes: _Optional[int] = ..., chunks: _Optional[int] = ..., requests_per_s: _Optional[int] = ..., leases: _Optional[int] = ...) -> None: ...

class ScrubRequest(_message.Message):
    __slots__ = ("begin", "tiers", "bytes_per_s")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    begin: bool
    tiers: _containers.RepeatedScalarFieldContainer[str]
    bytes_per_s: int
    def __init__(self, begin: bool = ..., tiers: _Optional[_Iterable[str]] = ..., bytes_per_s: _Optional[int] = ...) -> None: ...

class ScrubResponse(_message.Message):
    __slots__ = ("server", "begun", "running", "passes", "total_chunks", "checked_chunks", "checked_bytes", "damaged_chunks", "unread_chunks")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    CHECKED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    CHECKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    UNREAD_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    server: Server
    begun: bool
    running: bool
    passes: int
    total_chunks: int
    checked_chunks: int
    checked_bytes: int
    damaged_chunks: int
    unread_chunks: int
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., begun: bool = ..., running: bool = ..., passes: _Optional[int] = ..., total_chunks: _Optional[int] = ..., checked_chunks: _Optional[int] = ..., checked_bytes: _Optional[int] = ..., damaged_chunks: _Optional[int] = ..., unread_chunks: _Optional[int] = ...) -> None: ...

class SpacesRequest(_message.Message):
    __slots__ = ("tenant", "skip")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    skip: int
    def __init__(self, tenant: _Optional[str] = ..., skip: _Optional[int] = ...) -> None: ...

class SpacesResponse(_message.Message):
    __slots__ = ("server", "spaces", "left")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    SPACES_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    server: Server
    spaces: _containers.RepeatedCompositeFieldContainer[KnownSpace]
    left: int
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., spaces: _Optional[_Iterable[_Union[KnownSpace, _Mapping]]] = ..., left: _Optional[int] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("session_id", "boot_id", "cursor")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    boot_id: int
    cursor: int
    def __init__(self, session_id: _Optional[int] = ..., boot_id: _Optional[int] = ..., cursor: _Optional[int] = ...) -> None: ...

class ChunkEvent(_message.Message):
    __slots__ = ("key", "parent", "tokens", "tier", "accuracy")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    parent: bytes
    tokens: int
    tier: str
    accuracy: int
    def __init__(self, key: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., tokens: _Optional[int] = ..., tier: _Optional[str] = ..., accuracy: _Optional[int] = ...) -> None: ...

class EventsResponse(_message.Message):
    __slots__ = ("server", "cursor", "cleared", "events")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    server: Server
    cursor: int
    cleared: bool
    events: _containers.RepeatedCompositeFieldContainer[ChunkEvent]
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., cursor: _Optional[int] = ..., cleared: bool = ..., events: _Optional[_Iterable[_Union[ChunkEvent, _Mapping]]] = ...) -> None: ...
