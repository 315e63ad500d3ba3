"""The contract between the screen and the engine process: requests, events, and their framing.

Every message is one frame on a pipe: a 4-byte big-endian length, then msgpack (:func:`pack`, :class:`FrameReader`).
Nothing is unpickled, a frame has a size cap, and both directions are tagged unions that msgspec validates.
Times are in milliseconds unless a name says otherwise; memory is in bytes.

The imports below are the table of public names: ``X as X`` exports X.
"""

from __future__ import annotations

from engine.ipc.messages.answers import (
    MOST_LOGPROBS as MOST_LOGPROBS,
    MOST_SAMPLES as MOST_SAMPLES,
    Constraint as Constraint,
    FinishReason as FinishReason,
    LikelyToken as LikelyToken,
    Sample as Sample,
    TokenLogprob as TokenLogprob,
    Tool as Tool,
    ToolCall as ToolCall,
    ToolCallPiece as ToolCallPiece,
    ToolChoice as ToolChoice,
)
from engine.ipc.messages.events import (
    TERMINAL_EVENTS as TERMINAL_EVENTS,
    AnyEvent as AnyEvent,
    BeamEstimate as BeamEstimate,
    BeamEstimates as BeamEstimates,
    BeamProgress as BeamProgress,
    BenchResult as BenchResult,
    DeviceMemory as DeviceMemory,
    Done as Done,
    Event as Event,
    Failed as Failed,
    Finished as Finished,
    Hello as Hello,
    Loaded as Loaded,
    MachineMeasured as MachineMeasured,
    NetworkState as NetworkState,
    NodeTimes as NodeTimes,
    Notice as Notice,
    Piece as Piece,
    Planned as Planned,
    PlannedChoice as PlannedChoice,
    Prefill as Prefill,
    Progress as Progress,
    RingChanged as RingChanged,
    Timing as Timing,
    TokensCounted as TokensCounted,
    WarmUp as WarmUp,
)
from engine.ipc.messages.framing import (
    FRAME_LIMIT as FRAME_LIMIT,
    PROTOCOL_VERSION as PROTOCOL_VERSION,
    FrameReader as FrameReader,
    ProtocolError as ProtocolError,
    event_reader as event_reader,
    pack as pack,
    request_reader as request_reader,
)
from engine.ipc.messages.parts import (
    Beam as Beam,
    BenchKind as BenchKind,
    DoctorFacts as DoctorFacts,
    DtypeName as DtypeName,
    KeyValuesName as KeyValuesName,
    ExpertMovement as ExpertMovement,
    ExpertPolicy as ExpertPolicy,
    LayerTimes as LayerTimes,
    MemoryUse as MemoryUse,
    Message as Message,
    ModelFacts as ModelFacts,
    Partitioning as Partitioning,
    PhaseTimes as PhaseTimes,
    RuntimeName as RuntimeName,
    Sampling as Sampling,
    ReasoningFacts as ReasoningFacts,
)
from engine.ipc.messages.requests import (
    LENT_GPU_SHARE as LENT_GPU_SHARE,
    AnyRequest as AnyRequest,
    Bench as Bench,
    Cancel as Cancel,
    CloseNetwork as CloseNetwork,
    CountTokens as CountTokens,
    EstimateBeams as EstimateBeams,
    ForgetPeer as ForgetPeer,
    Generate as Generate,
    LendTerms as LendTerms,
    ListPeers as ListPeers,
    Load as Load,
    LoadOptions as LoadOptions,
    MachineOptions as MachineOptions,
    MeasureMachine as MeasureMachine,
    OpenNetwork as OpenNetwork,
    Pair as Pair,
    Plan as Plan,
    Prepare as Prepare,
    Pull as Pull,
    Request as Request,
    Resize as Resize,
    ShowCode as ShowCode,
    Shutdown as Shutdown,
    Watch as Watch,
)
from engine.ipc.messages.ring import (
    ExchangeName as ExchangeName,
    LendingFacts as LendingFacts,
    LinkFacts as LinkFacts,
    LoadingName as LoadingName,
    NodeId as NodeId,
    NodeShard as NodeShard,
    PeerFacts as PeerFacts,
    PeerState as PeerState,
    RingChoice as RingChoice,
    RingFacts as RingFacts,
    RingMode as RingMode,
)
