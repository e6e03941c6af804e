"""What crosses process borders: messages, sampling parameters, and the sockets and keys that carry them."""

from common.wire.adapter_messages import MAX_ADAPTERS, MAX_PATH
from common.wire.codec import MAX_IN_A_ROW, decode, encode
from common.wire.curve import Curve, read_key_pair, warn_of_readers
from common.wire.drop_log import DropLog
from common.wire.gatekeeper import Gatekeeper
from common.wire.kv_messages import MAX_REMOTE_BYTES
from common.wire.listening import CLIENTS_BACKLOG, in_url, inherited, listen, listening_host
from common.wire.message_fields import (
    COUNT_BITS,
    MAX_MESSAGE_BYTES,
    MAX_PRIORITY,
    ROLES,
    TOKEN_BYTES,
    Role,
    pack_tokens,
    unpack_tokens,
)
from common.wire.sampling_params import (
    LOGPROB_FLOOR,
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_GRAMMAR_CHARS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    PENALTIES,
    BadWord,
    Pooling,
    SampledToken,
    SamplingParams,
    ThinkingBudget,
    TokenLogprobs,
    bounds_of,
    default_of,
)
from common.wire.sockets import BACKLOG, WATCHED, Dialer, bind

__all__ = [
    "BACKLOG",
    "BadWord",
    "CLIENTS_BACKLOG",
    "COUNT_BITS",
    "Curve",
    "Dialer",
    "DropLog",
    "Gatekeeper",
    "LOGPROB_FLOOR",
    "MAX_ADAPTERS",
    "MAX_ALLOWED_TOKENS",
    "MAX_BAD_WORDS",
    "MAX_BAD_WORD_TOKENS",
    "MAX_GRAMMAR_CHARS",
    "MAX_IN_A_ROW",
    "MAX_LOGIT_BIAS",
    "MAX_MESSAGE_BYTES",
    "MAX_PATH",
    "MAX_PRIORITY",
    "MAX_REMOTE_BYTES",
    "MAX_STOP_TOKEN_IDS",
    "MAX_TOP_LOGPROBS",
    "PENALTIES",
    "Pooling",
    "ROLES",
    "Role",
    "SampledToken",
    "SamplingParams",
    "TOKEN_BYTES",
    "ThinkingBudget",
    "TokenLogprobs",
    "WATCHED",
    "bind",
    "bounds_of",
    "decode",
    "default_of",
    "encode",
    "in_url",
    "inherited",
    "listen",
    "listening_host",
    "pack_tokens",
    "read_key_pair",
    "unpack_tokens",
    "warn_of_readers",
]
