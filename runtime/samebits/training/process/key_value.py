"""``samebits.kv``: keys shared by all workers of a job and stored by its scheduler.

A value is one msgpack scalar: bytes, text, a 64-bit integer, a float, a bool or None, so programs in other languages
can read it.

Every change happens exactly once, even if the connection or the scheduler is lost meanwhile, and reads return the
newest change (linearizable). A key outlives the scheduler's process from the first call with ``durable=True``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from samebits.core.agent.agent_events import KeyAsk
from samebits.core.messages import MAX_KEY_BYTES, MAX_VALUE_BYTES, KeyAnswer, KeyOp, KeyOutcome
from samebits.errors import KeyValueError, UsageError
from samebits.training.process import context

__all__ = ["Versioned", "add", "compare_and_set", "delete", "get", "put", "read", "wait"]

Scalar = bytes | str | int | float | bool | None


class Versioned(NamedTuple):
    """A value and its version.

    A key's version only increases. A missing key has the value None and version 0.
    """

    value: Any
    version: int


def put(key: str, value: Scalar, *, durable: bool = False, timeout_s: float | None = None) -> int:
    """Set a key and return its new version.

    Args:
        key: 1 to 256 bytes of UTF-8.
        value: bytes, str, int (64 bits), float, bool or None; at most 64 KiB as msgpack.
        durable: from now on, keep the key when the scheduler's process ends. This costs one fsync.
        timeout_s: seconds to wait for a scheduler; None: TOPO_TIMEOUT.

    Raises:
        UsageError: called before :func:`samebits.init`, or an argument is invalid.
        KeyValueError: a limit was reached; the message names the limit and the fix.
        KeyValueTimeoutError: no scheduler responded; the change may or may not have been made.

    Example::

        samebits.kv.put("best_loss", 0.25, durable=True)
        assert samebits.kv.get("best_loss") == 0.25
    """
    ask = KeyAsk(KeyOp.PUT, _key("put", key), _packed("put", value), is_durable=durable)
    return _call("put", ask, timeout_s).version


def get(key: str, default: Any = None, *, timeout_s: float | None = None) -> Any:
    """Return a key's value, or ``default`` if the key is missing. Raises like :func:`put`."""
    found = read(key, timeout_s=timeout_s)
    return found.value if found.version else default


def read(key: str, *, timeout_s: float | None = None) -> Versioned:
    """Return a key's value and version; ``(None, 0)`` if it is missing. Raises like :func:`put`."""
    answer = _call("read", KeyAsk(KeyOp.GET, _key("read", key)), timeout_s)
    return Versioned(_value(key, answer) if answer.version else None, answer.version)


def delete(key: str, *, version: int | None = None, timeout_s: float | None = None) -> bool:
    """Delete a key and return whether it was deleted. Raises like :func:`put`.

    Args:
        key: the key.
        version: delete only if the key is at this version.
        timeout_s: as in :func:`put`.
    """
    ask = KeyAsk(KeyOp.DELETE, _key("delete", key), version=_version("delete", version))
    return _call("delete", ask, timeout_s).outcome is KeyOutcome.DONE


def add(key: str, amount: int = 1, *, durable: bool = False, timeout_s: float | None = None) -> int:
    """Add to an integer and return the sum. A missing key counts as 0.

    Each call gets a different sum, so the sums can be used to number items.

    Raises:
        KeyValueError: the key's value is not an integer, or the sum exceeds 64 bits. Otherwise like :func:`put`.

    Example::

        number = samebits.kv.add("next_item")
    """
    if not isinstance(amount, int) or not -(2**63) <= amount < 2**63:
        raise UsageError(f"samebits.kv.add({key!r}, {amount!r}): the amount must be a 64-bit integer")
    answer = _call("add", KeyAsk(KeyOp.ADD, _key("add", key), amount=int(amount), is_durable=durable), timeout_s)
    total: int = _value(key, answer)
    return total


def compare_and_set(
    key: str, value: Scalar, version: int, *, durable: bool = False, timeout_s: float | None = None
) -> int | None:
    """Set a key only if it is at ``version``; 0 means missing. Raises like :func:`put`.

    Return the new version, or None, without a change, if the key is at a different version.

    Example::

        while True:
            held = samebits.kv.read("best_loss")
            if held.version and held.value <= 0.2:
                break
            if samebits.kv.compare_and_set("best_loss", 0.2, held.version):
                break
    """
    name = "compare_and_set"
    packed = _packed(name, value)
    ask = KeyAsk(KeyOp.COMPARE_AND_SET, _key(name, key), packed, _version(name, version), is_durable=durable)
    answer = _call(name, ask, timeout_s)
    return answer.version if answer.outcome is KeyOutcome.DONE else None


def wait(key: str, *, above: int = 0, timeout_s: float | None = None) -> Versioned:
    """Wait until a key is at a version greater than ``above``; return its value and version.

    Inside ``elastic.run``, the wait ends with the generation, because the rank that would write the key may be lost.
    Announce a long wait with :func:`samebits.expect_pause`.

    Raises:
        KeyValueTimeoutError: the key was not written within ``timeout_s``.
        GenerationEndedError: a member was lost; ``elastic.run`` handles it. Otherwise like :func:`put`.
    """
    answer = _call("wait", KeyAsk(KeyOp.WAIT, _key("wait", key), version=_version("wait", above)), timeout_s)
    return Versioned(_value(key, answer), answer.version)


def _call(name: str, ask: KeyAsk, timeout_s: float | None) -> KeyAnswer:
    if timeout_s is not None and not 0 < timeout_s < float("inf"):
        raise UsageError(f"samebits.kv.{name}(…, timeout_s={timeout_s!r}): expected seconds, more than 0")
    agent = context.current(f"samebits.kv.{name}()").agent
    answer = agent.call_keys(ask, timeout_s, is_wait=ask.op is KeyOp.WAIT)
    if answer.outcome is KeyOutcome.REFUSED:
        raise KeyValueError(f"samebits.kv.{name}: {answer.text}")
    return answer


def _key(name: str, key: str) -> bytes:
    packed = key.encode(errors="surrogatepass") if isinstance(key, str) else b""
    if not 0 < len(packed) <= MAX_KEY_BYTES:
        raise UsageError(
            f"samebits.kv.{name}({str(key)[:80]!r}…): a key must have 1 to {MAX_KEY_BYTES} bytes, found "
            f"{len(packed)}. Fix: use another key"
        )
    return packed


def _version(name: str, version: int | None) -> int:
    if version is None:
        return 0
    if not isinstance(version, int) or not 0 <= version < 2**63:
        raise UsageError(f"samebits.kv.{name}(…, {version!r}): expected a version that an earlier call returned, or 0")
    return version


def _packed(name: str, value: Scalar) -> bytes:
    if not (value is None or isinstance(value, (bytes, str, int, float))):
        raise UsageError(
            f"samebits.kv.{name}: a value of type {type(value).__name__}; expected bytes, str, int, float, bool or "
            "None. Fix: pack it, as with json.dumps(value)"
        )
    try:
        packed = msgspec.msgpack.encode(value)
    except (msgspec.MsgspecError, OverflowError, UnicodeError) as error:
        raise UsageError(f"samebits.kv.{name}: msgpack cannot encode the value ({error})") from None
    if len(packed) > MAX_VALUE_BYTES:
        raise UsageError(
            f"samebits.kv.{name}: a value of {len(packed)} bytes exceeds the limit of {MAX_VALUE_BYTES}. Fix: write it "
            "to a file that all hosts see, and store its path"
        )
    return packed


def _value(key: str, answer: KeyAnswer) -> Any:
    try:
        return msgspec.msgpack.decode(answer.value)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise KeyValueError(
            f"samebits.kv: the value of key {key!r} is not msgpack ({error}). Fix: put it again"
        ) from None
