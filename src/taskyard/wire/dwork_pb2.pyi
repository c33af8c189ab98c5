from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    Succeeded: _ClassVar[Outcome]
    Failed: _ClassVar[Outcome]
    FailedForGood: _ClassVar[Outcome]
    RetryAt: _ClassVar[Outcome]
    DeferAll: _ClassVar[Outcome]
    DeferBack: _ClassVar[Outcome]
    Refused: _ClassVar[Outcome]
    Crashed: _ClassVar[Outcome]

class Standing(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    Blocked: _ClassVar[Standing]
    Delayed: _ClassVar[Standing]
    ReadyToGo: _ClassVar[Standing]
    Leased: _ClassVar[Standing]
    Finished: _ClassVar[Standing]
    GivenUp: _ClassVar[Standing]
    Cancelled: _ClassVar[Standing]
Succeeded: Outcome
Failed: Outcome
FailedForGood: Outcome
RetryAt: Outcome
DeferAll: Outcome
DeferBack: Outcome
Refused: Outcome
Crashed: Outcome
Blocked: Standing
Delayed: Standing
ReadyToGo: Standing
Leased: Standing
Finished: Standing
GivenUp: Standing
Cancelled: Standing

class TaskMsg(_message.Message):
    __slots__ = ("name", "origin", "pred", "succ", "log", "payload", "terms", "lane", "attempt", "outcome", "text", "retry_at_ns", "output", "percent", "started_ns", "run_ns", "exit", "cpu_ns", "memory_max_bytes")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        Pending: _ClassVar[TaskMsg.State]
        Stolen: _ClassVar[TaskMsg.State]
        Waiting: _ClassVar[TaskMsg.State]
        Copying: _ClassVar[TaskMsg.State]
        Ready: _ClassVar[TaskMsg.State]
        Started: _ClassVar[TaskMsg.State]
        Done: _ClassVar[TaskMsg.State]
        Recorded: _ClassVar[TaskMsg.State]
    Pending: TaskMsg.State
    Stolen: TaskMsg.State
    Waiting: TaskMsg.State
    Copying: TaskMsg.State
    Ready: TaskMsg.State
    Started: TaskMsg.State
    Done: TaskMsg.State
    Recorded: TaskMsg.State
    class Dep(_message.Message):
        __slots__ = ("name", "location")
        NAME_FIELD_NUMBER: _ClassVar[int]
        LOCATION_FIELD_NUMBER: _ClassVar[int]
        name: bytes
        location: bytes
        def __init__(self, name: _Optional[bytes] = ..., location: _Optional[bytes] = ...) -> None: ...
    class LogMsg(_message.Message):
        __slots__ = ("state", "time")
        STATE_FIELD_NUMBER: _ClassVar[int]
        TIME_FIELD_NUMBER: _ClassVar[int]
        state: TaskMsg.State
        time: int
        def __init__(self, state: _Optional[_Union[TaskMsg.State, str]] = ..., time: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    PRED_FIELD_NUMBER: _ClassVar[int]
    SUCC_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    RETRY_AT_NS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    PERCENT_FIELD_NUMBER: _ClassVar[int]
    STARTED_NS_FIELD_NUMBER: _ClassVar[int]
    RUN_NS_FIELD_NUMBER: _ClassVar[int]
    EXIT_FIELD_NUMBER: _ClassVar[int]
    CPU_NS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    origin: bytes
    pred: _containers.RepeatedScalarFieldContainer[bytes]
    succ: _containers.RepeatedScalarFieldContainer[bytes]
    log: _containers.RepeatedScalarFieldContainer[bytes]
    payload: bytes
    terms: Terms
    lane: bytes
    attempt: int
    outcome: Outcome
    text: bytes
    retry_at_ns: int
    output: bytes
    percent: int
    started_ns: int
    run_ns: int
    exit: int
    cpu_ns: int
    memory_max_bytes: int
    def __init__(self, name: _Optional[bytes] = ..., origin: _Optional[bytes] = ..., pred: _Optional[_Iterable[bytes]] = ..., succ: _Optional[_Iterable[bytes]] = ..., log: _Optional[_Iterable[bytes]] = ..., payload: _Optional[bytes] = ..., terms: _Optional[_Union[Terms, _Mapping]] = ..., lane: _Optional[bytes] = ..., attempt: _Optional[int] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., text: _Optional[bytes] = ..., retry_at_ns: _Optional[int] = ..., output: _Optional[bytes] = ..., percent: _Optional[int] = ..., started_ns: _Optional[int] = ..., run_ns: _Optional[int] = ..., exit: _Optional[int] = ..., cpu_ns: _Optional[int] = ..., memory_max_bytes: _Optional[int] = ...) -> None: ...

class Terms(_message.Message):
    __slots__ = ("campaign", "service", "priority", "due_ns", "expires_ns", "expires_hard_ns", "retry", "lease_ns", "time_limit_ns", "slots", "crashes_max", "origin", "environment", "resources")
    class Retry(_message.Message):
        __slots__ = ("delay_ns",)
        DELAY_NS_FIELD_NUMBER: _ClassVar[int]
        delay_ns: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, delay_ns: _Optional[_Iterable[int]] = ...) -> None: ...
    CAMPAIGN_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DUE_NS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_NS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_HARD_NS_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    LEASE_NS_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMIT_NS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    CRASHES_MAX_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    campaign: bytes
    service: bytes
    priority: int
    due_ns: int
    expires_ns: int
    expires_hard_ns: int
    retry: Terms.Retry
    lease_ns: int
    time_limit_ns: int
    slots: int
    crashes_max: int
    origin: bytes
    environment: bytes
    resources: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, campaign: _Optional[bytes] = ..., service: _Optional[bytes] = ..., priority: _Optional[int] = ..., due_ns: _Optional[int] = ..., expires_ns: _Optional[int] = ..., expires_hard_ns: _Optional[int] = ..., retry: _Optional[_Union[Terms.Retry, _Mapping]] = ..., lease_ns: _Optional[int] = ..., time_limit_ns: _Optional[int] = ..., slots: _Optional[int] = ..., crashes_max: _Optional[int] = ..., origin: _Optional[bytes] = ..., environment: _Optional[bytes] = ..., resources: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Resource(_message.Message):
    __slots__ = ("name", "amount")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    amount: int
    def __init__(self, name: _Optional[bytes] = ..., amount: _Optional[int] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("name", "payload", "terms", "terms_at", "lane", "after", "after_count", "attempt", "outcome", "text", "retry_at_ns", "standing", "percent", "output", "after_campaign", "text_bytes_total", "text_digest", "output_bytes_total", "started_ns", "run_ns", "exit", "cpu_ns", "memory_max_bytes", "note", "restart", "submitted_ns", "stdout", "stdout_bytes_total", "stdout_digest", "stderr", "stderr_bytes_total", "stderr_digest", "has_stderr", "stream", "offset")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    TERMS_AT_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    AFTER_COUNT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    RETRY_AT_NS_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    PERCENT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    AFTER_CAMPAIGN_FIELD_NUMBER: _ClassVar[int]
    TEXT_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    TEXT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STARTED_NS_FIELD_NUMBER: _ClassVar[int]
    RUN_NS_FIELD_NUMBER: _ClassVar[int]
    EXIT_FIELD_NUMBER: _ClassVar[int]
    CPU_NS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_NS_FIELD_NUMBER: _ClassVar[int]
    STDOUT_FIELD_NUMBER: _ClassVar[int]
    STDOUT_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STDOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    STDERR_FIELD_NUMBER: _ClassVar[int]
    STDERR_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STDERR_DIGEST_FIELD_NUMBER: _ClassVar[int]
    HAS_STDERR_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    name: _containers.RepeatedScalarFieldContainer[bytes]
    payload: _containers.RepeatedScalarFieldContainer[bytes]
    terms: _containers.RepeatedScalarFieldContainer[bytes]
    terms_at: _containers.RepeatedScalarFieldContainer[int]
    lane: _containers.RepeatedScalarFieldContainer[bytes]
    after: _containers.RepeatedScalarFieldContainer[bytes]
    after_count: _containers.RepeatedScalarFieldContainer[int]
    attempt: _containers.RepeatedScalarFieldContainer[int]
    outcome: _containers.RepeatedScalarFieldContainer[Outcome]
    text: _containers.RepeatedScalarFieldContainer[bytes]
    retry_at_ns: _containers.RepeatedScalarFieldContainer[int]
    standing: _containers.RepeatedScalarFieldContainer[Standing]
    percent: _containers.RepeatedScalarFieldContainer[int]
    output: _containers.RepeatedScalarFieldContainer[bytes]
    after_campaign: _containers.RepeatedScalarFieldContainer[bytes]
    text_bytes_total: _containers.RepeatedScalarFieldContainer[int]
    text_digest: _containers.RepeatedScalarFieldContainer[bytes]
    output_bytes_total: _containers.RepeatedScalarFieldContainer[int]
    started_ns: _containers.RepeatedScalarFieldContainer[int]
    run_ns: _containers.RepeatedScalarFieldContainer[int]
    exit: _containers.RepeatedScalarFieldContainer[int]
    cpu_ns: _containers.RepeatedScalarFieldContainer[int]
    memory_max_bytes: _containers.RepeatedScalarFieldContainer[int]
    note: _containers.RepeatedScalarFieldContainer[bytes]
    restart: bool
    submitted_ns: _containers.RepeatedScalarFieldContainer[int]
    stdout: _containers.RepeatedScalarFieldContainer[bytes]
    stdout_bytes_total: _containers.RepeatedScalarFieldContainer[int]
    stdout_digest: _containers.RepeatedScalarFieldContainer[bytes]
    stderr: _containers.RepeatedScalarFieldContainer[bytes]
    stderr_bytes_total: _containers.RepeatedScalarFieldContainer[int]
    stderr_digest: _containers.RepeatedScalarFieldContainer[bytes]
    has_stderr: _containers.RepeatedScalarFieldContainer[bool]
    stream: _containers.RepeatedScalarFieldContainer[int]
    offset: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[_Iterable[bytes]] = ..., payload: _Optional[_Iterable[bytes]] = ..., terms: _Optional[_Iterable[bytes]] = ..., terms_at: _Optional[_Iterable[int]] = ..., lane: _Optional[_Iterable[bytes]] = ..., after: _Optional[_Iterable[bytes]] = ..., after_count: _Optional[_Iterable[int]] = ..., attempt: _Optional[_Iterable[int]] = ..., outcome: _Optional[_Iterable[_Union[Outcome, str]]] = ..., text: _Optional[_Iterable[bytes]] = ..., retry_at_ns: _Optional[_Iterable[int]] = ..., standing: _Optional[_Iterable[_Union[Standing, str]]] = ..., percent: _Optional[_Iterable[int]] = ..., output: _Optional[_Iterable[bytes]] = ..., after_campaign: _Optional[_Iterable[bytes]] = ..., text_bytes_total: _Optional[_Iterable[int]] = ..., text_digest: _Optional[_Iterable[bytes]] = ..., output_bytes_total: _Optional[_Iterable[int]] = ..., started_ns: _Optional[_Iterable[int]] = ..., run_ns: _Optional[_Iterable[int]] = ..., exit: _Optional[_Iterable[int]] = ..., cpu_ns: _Optional[_Iterable[int]] = ..., memory_max_bytes: _Optional[_Iterable[int]] = ..., note: _Optional[_Iterable[bytes]] = ..., restart: bool = ..., submitted_ns: _Optional[_Iterable[int]] = ..., stdout: _Optional[_Iterable[bytes]] = ..., stdout_bytes_total: _Optional[_Iterable[int]] = ..., stdout_digest: _Optional[_Iterable[bytes]] = ..., stderr: _Optional[_Iterable[bytes]] = ..., stderr_bytes_total: _Optional[_Iterable[int]] = ..., stderr_digest: _Optional[_Iterable[bytes]] = ..., has_stderr: _Optional[_Iterable[bool]] = ..., stream: _Optional[_Iterable[int]] = ..., offset: _Optional[_Iterable[int]] = ...) -> None: ...

class WorkerMsg(_message.Message):
    __slots__ = ("service", "slots", "silence_ns", "incarnation", "ahead", "host", "pid", "replaces", "heartbeat_ns", "resources", "forwards", "forwards_to")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SILENCE_NS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_NS_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    FORWARDS_FIELD_NUMBER: _ClassVar[int]
    FORWARDS_TO_FIELD_NUMBER: _ClassVar[int]
    service: _containers.RepeatedScalarFieldContainer[bytes]
    slots: int
    silence_ns: int
    incarnation: int
    ahead: int
    host: bytes
    pid: int
    replaces: int
    heartbeat_ns: int
    resources: _containers.RepeatedScalarFieldContainer[bytes]
    forwards: bool
    forwards_to: bytes
    def __init__(self, service: _Optional[_Iterable[bytes]] = ..., slots: _Optional[int] = ..., silence_ns: _Optional[int] = ..., incarnation: _Optional[int] = ..., ahead: _Optional[int] = ..., host: _Optional[bytes] = ..., pid: _Optional[int] = ..., replaces: _Optional[int] = ..., heartbeat_ns: _Optional[int] = ..., resources: _Optional[_Iterable[bytes]] = ..., forwards: bool = ..., forwards_to: _Optional[bytes] = ...) -> None: ...

class ScopeMsg(_message.Message):
    __slots__ = ("campaign", "service", "lane", "standing", "match")
    CAMPAIGN_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    MATCH_FIELD_NUMBER: _ClassVar[int]
    campaign: bytes
    service: bytes
    lane: bytes
    standing: _containers.RepeatedScalarFieldContainer[Standing]
    match: bytes
    def __init__(self, campaign: _Optional[bytes] = ..., service: _Optional[bytes] = ..., lane: _Optional[bytes] = ..., standing: _Optional[_Iterable[_Union[Standing, str]]] = ..., match: _Optional[bytes] = ...) -> None: ...

class ClauseMsg(_message.Message):
    __slots__ = ("name", "match", "command", "lane_workers_max", "overfeed", "idle_ns_max", "hunger_ns_max", "lane_template", "lines", "interval_ns")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MATCH_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    LANE_WORKERS_MAX_FIELD_NUMBER: _ClassVar[int]
    OVERFEED_FIELD_NUMBER: _ClassVar[int]
    IDLE_NS_MAX_FIELD_NUMBER: _ClassVar[int]
    HUNGER_NS_MAX_FIELD_NUMBER: _ClassVar[int]
    LANE_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_NS_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    match: bytes
    command: bytes
    lane_workers_max: int
    overfeed: int
    idle_ns_max: int
    hunger_ns_max: int
    lane_template: bytes
    lines: bytes
    interval_ns: int
    def __init__(self, name: _Optional[bytes] = ..., match: _Optional[bytes] = ..., command: _Optional[bytes] = ..., lane_workers_max: _Optional[int] = ..., overfeed: _Optional[int] = ..., idle_ns_max: _Optional[int] = ..., hunger_ns_max: _Optional[int] = ..., lane_template: _Optional[bytes] = ..., lines: _Optional[bytes] = ..., interval_ns: _Optional[int] = ...) -> None: ...

class RulesMsg(_message.Message):
    __slots__ = ("clause", "version")
    CLAUSE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    clause: _containers.RepeatedScalarFieldContainer[bytes]
    version: int
    def __init__(self, clause: _Optional[_Iterable[bytes]] = ..., version: _Optional[int] = ...) -> None: ...

class PlaceMsg(_message.Message):
    __slots__ = ("service", "lane")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    service: bytes
    lane: bytes
    def __init__(self, service: _Optional[bytes] = ..., lane: _Optional[bytes] = ...) -> None: ...

class RefusedTask(_message.Message):
    __slots__ = ("name", "code", "reason", "index")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    code: bytes
    reason: bytes
    index: int
    def __init__(self, name: _Optional[bytes] = ..., code: _Optional[bytes] = ..., reason: _Optional[bytes] = ..., index: _Optional[int] = ...) -> None: ...

class Envelope(_message.Message):
    __slots__ = ("peer", "message")
    PEER_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    peer: int
    message: bytes
    def __init__(self, peer: _Optional[int] = ..., message: _Optional[bytes] = ...) -> None: ...

class QueryMsg(_message.Message):
    __slots__ = ("type", "task", "name", "n", "location", "batch", "request", "worker", "scope", "reason", "code", "refused", "document", "rules", "broker", "wait_ms", "stream", "seen", "heartbeat_ns", "waiting", "rules_version", "incarnation", "host", "trouble", "malformed", "calls_waiting", "calls_kept", "unknown", "check_only", "environment", "cursor", "journal", "everything", "any_campaign", "place", "changes", "epoch", "force", "attempt", "stream_number", "offset", "live", "held", "value", "data", "gone", "envelope", "length", "digest")
    class Type(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        Create: _ClassVar[QueryMsg.Type]
        Steal: _ClassVar[QueryMsg.Type]
        Complete: _ClassVar[QueryMsg.Type]
        Transfer: _ClassVar[QueryMsg.Type]
        Lookup: _ClassVar[QueryMsg.Type]
        NotFound: _ClassVar[QueryMsg.Type]
        OK: _ClassVar[QueryMsg.Type]
        Exit: _ClassVar[QueryMsg.Type]
        Error: _ClassVar[QueryMsg.Type]
        Cancel: _ClassVar[QueryMsg.Type]
        Retry: _ClassVar[QueryMsg.Type]
        Progress: _ClassVar[QueryMsg.Type]
        Heartbeat: _ClassVar[QueryMsg.Type]
        Watch: _ClassVar[QueryMsg.Type]
        List: _ClassVar[QueryMsg.Type]
        Stats: _ClassVar[QueryMsg.Type]
        Explain: _ClassVar[QueryMsg.Type]
        Drain: _ClassVar[QueryMsg.Type]
        Show: _ClassVar[QueryMsg.Type]
        Read: _ClassVar[QueryMsg.Type]
        Workers: _ClassVar[QueryMsg.Type]
        Pause: _ClassVar[QueryMsg.Type]
        Resume: _ClassVar[QueryMsg.Type]
        Failover: _ClassVar[QueryMsg.Type]
        Follow: _ClassVar[QueryMsg.Type]
        Lanes: _ClassVar[QueryMsg.Type]
        Move: _ClassVar[QueryMsg.Type]
        Expire: _ClassVar[QueryMsg.Type]
        Rules: _ClassVar[QueryMsg.Type]
        Edit: _ClassVar[QueryMsg.Type]
        Append: _ClassVar[QueryMsg.Type]
        Values: _ClassVar[QueryMsg.Type]
        PutValue: _ClassVar[QueryMsg.Type]
        Relay: _ClassVar[QueryMsg.Type]
        Number: _ClassVar[QueryMsg.Type]
        Numbers: _ClassVar[QueryMsg.Type]
    Create: QueryMsg.Type
    Steal: QueryMsg.Type
    Complete: QueryMsg.Type
    Transfer: QueryMsg.Type
    Lookup: QueryMsg.Type
    NotFound: QueryMsg.Type
    OK: QueryMsg.Type
    Exit: QueryMsg.Type
    Error: QueryMsg.Type
    Cancel: QueryMsg.Type
    Retry: QueryMsg.Type
    Progress: QueryMsg.Type
    Heartbeat: QueryMsg.Type
    Watch: QueryMsg.Type
    List: QueryMsg.Type
    Stats: QueryMsg.Type
    Explain: QueryMsg.Type
    Drain: QueryMsg.Type
    Show: QueryMsg.Type
    Read: QueryMsg.Type
    Workers: QueryMsg.Type
    Pause: QueryMsg.Type
    Resume: QueryMsg.Type
    Failover: QueryMsg.Type
    Follow: QueryMsg.Type
    Lanes: QueryMsg.Type
    Move: QueryMsg.Type
    Expire: QueryMsg.Type
    Rules: QueryMsg.Type
    Edit: QueryMsg.Type
    Append: QueryMsg.Type
    Values: QueryMsg.Type
    PutValue: QueryMsg.Type
    Relay: QueryMsg.Type
    Number: QueryMsg.Type
    Numbers: QueryMsg.Type
    class Unknown(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        Refuse: _ClassVar[QueryMsg.Unknown]
        Await: _ClassVar[QueryMsg.Unknown]
        TakeAsDone: _ClassVar[QueryMsg.Unknown]
    Refuse: QueryMsg.Unknown
    Await: QueryMsg.Unknown
    TakeAsDone: QueryMsg.Unknown
    TYPE_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    BROKER_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_NS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RULES_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    MALFORMED_FIELD_NUMBER: _ClassVar[int]
    CALLS_WAITING_FIELD_NUMBER: _ClassVar[int]
    CALLS_KEPT_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    CHECK_ONLY_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_FIELD_NUMBER: _ClassVar[int]
    EVERYTHING_FIELD_NUMBER: _ClassVar[int]
    ANY_CAMPAIGN_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STREAM_NUMBER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    type: QueryMsg.Type
    task: _containers.RepeatedScalarFieldContainer[bytes]
    name: bytes
    n: int
    location: bytes
    batch: Batch
    request: int
    worker: WorkerMsg
    scope: ScopeMsg
    reason: bytes
    code: bytes
    refused: _containers.RepeatedScalarFieldContainer[bytes]
    document: bytes
    rules: RulesMsg
    broker: int
    wait_ms: int
    stream: bool
    seen: int
    heartbeat_ns: int
    waiting: int
    rules_version: int
    incarnation: int
    host: bytes
    trouble: bytes
    malformed: int
    calls_waiting: _containers.RepeatedScalarFieldContainer[int]
    calls_kept: int
    unknown: QueryMsg.Unknown
    check_only: bool
    environment: bytes
    cursor: int
    journal: bytes
    everything: bool
    any_campaign: bool
    place: PlaceMsg
    changes: Terms
    epoch: int
    force: bool
    attempt: int
    stream_number: int
    offset: int
    live: bool
    held: bytes
    value: bytes
    data: bytes
    gone: _containers.RepeatedScalarFieldContainer[int]
    envelope: _containers.RepeatedScalarFieldContainer[bytes]
    length: int
    digest: bytes
    def __init__(self, type: _Optional[_Union[QueryMsg.Type, str]] = ..., task: _Optional[_Iterable[bytes]] = ..., name: _Optional[bytes] = ..., n: _Optional[int] = ..., location: _Optional[bytes] = ..., batch: _Optional[_Union[Batch, _Mapping]] = ..., request: _Optional[int] = ..., worker: _Optional[_Union[WorkerMsg, _Mapping]] = ..., scope: _Optional[_Union[ScopeMsg, _Mapping]] = ..., reason: _Optional[bytes] = ..., code: _Optional[bytes] = ..., refused: _Optional[_Iterable[bytes]] = ..., document: _Optional[bytes] = ..., rules: _Optional[_Union[RulesMsg, _Mapping]] = ..., broker: _Optional[int] = ..., wait_ms: _Optional[int] = ..., stream: bool = ..., seen: _Optional[int] = ..., heartbeat_ns: _Optional[int] = ..., waiting: _Optional[int] = ..., rules_version: _Optional[int] = ..., incarnation: _Optional[int] = ..., host: _Optional[bytes] = ..., trouble: _Optional[bytes] = ..., malformed: _Optional[int] = ..., calls_waiting: _Optional[_Iterable[int]] = ..., calls_kept: _Optional[int] = ..., unknown: _Optional[_Union[QueryMsg.Unknown, str]] = ..., check_only: bool = ..., environment: _Optional[bytes] = ..., cursor: _Optional[int] = ..., journal: _Optional[bytes] = ..., everything: bool = ..., any_campaign: bool = ..., place: _Optional[_Union[PlaceMsg, _Mapping]] = ..., changes: _Optional[_Union[Terms, _Mapping]] = ..., epoch: _Optional[int] = ..., force: bool = ..., attempt: _Optional[int] = ..., stream_number: _Optional[int] = ..., offset: _Optional[int] = ..., live: bool = ..., held: _Optional[bytes] = ..., value: _Optional[bytes] = ..., data: _Optional[bytes] = ..., gone: _Optional[_Iterable[int]] = ..., envelope: _Optional[_Iterable[bytes]] = ..., length: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...
