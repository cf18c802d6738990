"""Checks of the plug-in as data and of a runner's life: P1, L1 to L5."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import get_args

from runnerd_spi.errors import LifecycleError, ModelLoadError, RunnerError
from runnerd_spi.plan import StepPlan
from runnerd_spi.runner import KVMemory, ModelInfo, ModelRunner, RunnerCapabilities, RunnerPlugin, Support
from runnerd_spi.testing.driver import TraceRun
from runnerd_spi.testing.kit import Kit, difference_of
from runnerd_spi.testing.subject import Broken, Session, loaded_frameworks, no_progress
from runnerd_spi.testing.traces import Trace, TraceRequest

CLOSE_SECONDS = 60.0
"""Longest time that close may take."""
NUM_FUZZED = 30
_NUM_BLOCKS = 64

Call = tuple[str, Callable[[ModelRunner], object]]

_ORDER: tuple[Call, ...] = (
    ("load", lambda runner: runner.load(no_progress)),
    ("profile", lambda runner: runner.profile()),
    ("init_kv_cache", lambda runner: runner.init_kv_cache(_NUM_BLOCKS)),
    ("warm_up", lambda runner: runner.warm_up()),
    ("execute_model", lambda runner: runner.execute_model(StepPlan(step_id=0)).result(CLOSE_SECONDS)),
)


def plugin_is_data(kit: Kit) -> None:
    """P1."""
    plugin = kit.subject.plugin
    if not isinstance(plugin, RunnerPlugin):
        raise Broken(f"the plug-in is a {type(plugin).__name__}, expected a RunnerPlugin")
    if not plugin.name or not plugin.description:
        raise Broken(f"the plug-in has the name {plugin.name!r} and the description {plugin.description!r}")
    _check_capabilities(plugin.capabilities)
    names = [option.name for option in plugin.options]
    for option in plugin.options:
        if names.count(option.name) > 1:
            raise Broken(f"option {option.name!r} is declared twice")
        # bool is an int to isinstance.
        if option.default is not None and type(option.default) is not option.type:
            raise Broken(f"option {option.name!r} has the default {option.default!r}, expected {option.type.__name__}")
        if not option.help:
            raise Broken(f"option {option.name!r} has no help")


def frameworks_imported(before: frozenset[str]) -> None:
    """P1, for whoever loads the plug-in: see what the import brought along."""
    if brought := loaded_frameworks() - before:
        raise Broken(f"importing the plug-in imports {', '.join(sorted(brought))}, which takes seconds")


def calls_come_in_order(kit: Kit) -> None:
    """L1."""
    runner = kit.subject.create()
    try:
        for index, (_, right) in enumerate(_ORDER):
            for name, wrong in _ORDER:
                if name != _ORDER[index][0]:
                    _refused(runner, name, wrong, f"before {_ORDER[index][0]}")
            right(runner)
        for name, wrong in _ORDER[:-1]:
            _refused(runner, name, wrong, "after execute_model")
        _is_unchanged(kit, runner)
    finally:
        runner.close()
    for number in range(NUM_FUZZED if kit.is_cheap else 2):
        _fuzz(kit, kit.seed + number)


def close_ends_everything(kit: Kit) -> None:
    """L2."""
    for num_calls in range(len(_ORDER) + 1):
        after = "create" if num_calls == 0 else _ORDER[num_calls - 1][0]
        threads = set(threading.enumerate())
        runner = kit.subject.create()
        for _, call in _ORDER[:num_calls]:
            call(runner)
        for count in ("first", "second"):
            _close(runner, f"{count} close after {after}")
        for name, call in _ORDER:
            _refused(runner, name, call, f"on a runner closed after {after}")
        _threads_end(threads, after)
    _close_with_launched_work(kit)


def load_tells_what_it_found(kit: Kit) -> None:
    """L3."""
    reports: list[tuple[str, int, int]] = []
    runner = kit.subject.create()
    try:
        info = runner.load(lambda stage, done, total: reports.append((stage, done, total)))
    finally:
        runner.close()
    for stage, done, total in reports:
        if not stage or not 0 <= done <= total:
            raise Broken(f"load reported stage {stage!r}, {done} of {total}; expected a phrase and 0 <= done <= total")
    _check_info(info, kit)
    _unreadable_is_refused(kit)


def memory_is_budgeted(kit: Kit) -> None:
    """L4."""
    runner = kit.subject.create()
    try:
        info = runner.load(no_progress)
        budget = runner.profile()
        if budget.bytes_per_block < 1 or budget.available_bytes < budget.bytes_per_block:
            raise Broken(
                f"profile gives {budget.available_bytes} bytes for blocks of {budget.bytes_per_block}: not one block"
            )
        for num_blocks in (0, -1):
            try:
                runner.init_kv_cache(num_blocks)
            except (RunnerError, ValueError):
                continue
            raise Broken(f"init_kv_cache({num_blocks}) was accepted; expected RunnerError or ValueError")
        try:
            runner.init_kv_cache(min(_NUM_BLOCKS, budget.max_num_blocks or _NUM_BLOCKS))
        except Exception as error:
            raise Broken(f"after a refused init_kv_cache, a right one raises {_named(error)}") from error
        if not info.vocab_size:
            raise Broken("load gave a vocabulary of 0 tokens")
    finally:
        runner.close()


def warm_up_leaves_no_trace(kit: Kit) -> None:
    """L5."""
    params = kit.drawn(5)
    with kit.session(fresh=True) as session:
        # One token, so that whatever warm-up left behind it in the table or the counts would matter.
        requests = tuple(TraceRequest((slot % session.sizes.vocab_size,), 6, params) for slot in range(4))
        trace = Trace(session.config.max_in_flight, requests)
        try:
            first = TraceRun(session, trace).run()
        except Exception as error:
            raise Broken(f"the first plans after warm_up, steps 0 and on, in all slots: {_named(error)}") from error
        second = TraceRun(session, trace).run()
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        if one.token_ids != other.token_ids:
            raise Broken(
                f"the first request of slot {index} after warm_up got {one.token_ids}, the same one later "
                f"{other.token_ids}"
            )


def _check_capabilities(capabilities: RunnerCapabilities) -> None:
    if not 1 <= capabilities.min_in_flight <= capabilities.max_in_flight:
        raise Broken(
            f"min_in_flight {capabilities.min_in_flight} and max_in_flight {capabilities.max_in_flight}, expected "
            "1 <= min <= max"
        )
    if not capabilities.dtypes or not capabilities.block_sizes or min(capabilities.block_sizes) < 1:
        raise Broken(f"dtypes {capabilities.dtypes} and block_sizes {capabilities.block_sizes}, expected one each")
    for name, annotation in type(capabilities).__annotations__.items():
        value = getattr(capabilities, name)
        if annotation == "Support" and value not in get_args(Support):
            raise Broken(f"capability {name} is {value!r}, expected one of {', '.join(get_args(Support))}")
    if capabilities.kv_memory not in get_args(KVMemory):
        raise Broken(f"kv_memory is {capabilities.kv_memory!r}, expected one of {', '.join(get_args(KVMemory))}")
    if capabilities.kv_memory == "tokens" and (capabilities.block_sizes != (1,) or capabilities.prefix_caching != "no"):
        raise Broken(
            f"kv_memory is 'tokens', but block_sizes is {capabilities.block_sizes} and prefix_caching "
            f"{capabilities.prefix_caching!r}; expected (1,) and 'no', as no blocks are granted that could be shared"
        )
    if (capabilities.logprobs != "no") != (capabilities.max_logprobs > 0):
        raise Broken(f"logprobs is {capabilities.logprobs!r}, but max_logprobs is {capabilities.max_logprobs}")


def _check_info(info: ModelInfo, kit: Kit) -> None:
    if info.vocab_size < 2 or any(not 0 <= token < info.vocab_size for token in info.eos_token_ids):
        raise Broken(f"a vocabulary of {info.vocab_size} tokens with EOS {info.eos_token_ids}")
    configured = kit.subject.config().max_model_len
    if configured is not None and info.max_model_len != configured:
        raise Broken(f"max_model_len {configured} was configured, load gave {info.max_model_len}")
    if info.dtype not in kit.subject.plugin.capabilities.dtypes:
        raise Broken(
            f"load gave dtype {info.dtype!r}, expected one of {', '.join(kit.subject.plugin.capabilities.dtypes)}"
        )
    if not info.name or not info.device:
        raise Broken(f"load gave the name {info.name!r} and the device {info.device!r}")


def _unreadable_is_refused(kit: Kit) -> None:
    config = replace(kit.subject.config(), model="/nonexistent/model")
    runner = kit.subject.plugin.create(config)
    try:
        runner.load(no_progress)
    except ModelLoadError as error:
        if not str(error):
            raise Broken("load refused a model that does not exist without a word") from error
    except Exception as error:
        raise Broken(f"load of a model that does not exist raises {_named(error)}; expected ModelLoadError") from error
    else:
        raise Broken("load accepted the model '/nonexistent/model'; expected ModelLoadError")
    finally:
        _close(runner, "close after a failed load")


def _refused(runner: ModelRunner, name: str, call: Callable[[ModelRunner], object], when: str) -> None:
    try:
        call(runner)
    except LifecycleError:
        return
    except Exception as error:
        raise Broken(f"{name} {when} raised {_named(error)}; expected LifecycleError") from error
    raise Broken(f"{name} {when} was accepted; expected LifecycleError")


def _is_unchanged(kit: Kit, runner: ModelRunner) -> None:
    """Step 0 was run: the next ones must be as ever."""
    with kit.session() as other:
        session = Session(runner, other.config, other.info, _NUM_BLOCKS, kit.subject.plugin.capabilities)
    session.next_step_id = 1
    request = TraceRequest((1, 0), 3, kit.drawn(3))
    [outcome] = TraceRun(session, Trace(session.config.max_in_flight, (request,))).run()
    if difference := difference_of(request, outcome, kit.alone(request)):
        raise Broken(f"after refused calls, {difference}")


def _fuzz(kit: Kit, seed: int) -> None:
    """Make random calls, legal or not, beside a model of what is legal."""
    random = Random(seed)
    calls = [random.randrange(len(_ORDER) + 1) for _ in range(14)]
    # Half of the sequences begin with the order, so that they get far.
    calls[:0] = range(random.choice((0, random.randint(1, len(_ORDER)))))
    names = ", ".join("close" if call == len(_ORDER) else _ORDER[call][0] for call in calls)
    runner = kit.subject.create()
    expected, closed, has_run = 0, False, False
    try:
        for call in calls:
            if call == len(_ORDER) and closed:
                continue
            if call == len(_ORDER):
                _close(runner, f"close in the sequence {names}")
                closed = True
            elif call == expected and not closed and not (call == len(_ORDER) - 1 and has_run):
                _ORDER[call][1](runner)
                has_run = call == len(_ORDER) - 1
                expected = min(expected + 1, len(_ORDER) - 1)
            elif call != expected or closed:
                _refused(runner, _ORDER[call][0], _ORDER[call][1], f"in the sequence {names}")
    finally:
        if not closed:
            runner.close()


def _close(runner: ModelRunner, what: str) -> None:
    begin = time.monotonic()
    try:
        runner.close()
    except Exception as error:
        raise Broken(f"{what} raised {_named(error)}") from error
    seconds = time.monotonic() - begin
    if seconds > CLOSE_SECONDS:
        raise Broken(f"{what} took {seconds:.0f} seconds, at most {CLOSE_SECONDS:.0f} are allowed")


def _threads_end(before: set[threading.Thread], after: str) -> None:
    """Daemon threads may be a library's; the others would keep the process alive."""
    deadline = time.monotonic() + 10.0
    left = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    for thread in left:
        thread.join(max(deadline - time.monotonic(), 0.0))
        if thread.is_alive():
            raise Broken(f"the thread {thread.name!r} runs on after close (closed after {after})")


def _close_with_launched_work(kit: Kit) -> None:
    # Of its own, for it is closed here.
    session = kit.subject.open(kit.depth)
    try:
        run = TraceRun(session, Trace(kit.depth, (TraceRequest((1, 0), 12, kit.drawn(1)),)))
        handles = [run.launch_only(step).handle for step in range(kit.depth + 2)]
    finally:
        _close(session.runner, "close with launched work")
    for handle in handles:
        if not handle.done():
            raise Broken(f"step {handle.step_id} was launched, but is not done after close")
        try:
            handle.result(0.0)
        except Exception as error:
            raise Broken(f"after close, the result of step {handle.step_id} raises {_named(error)}") from error


def _named(error: Exception) -> str:
    return str(error) if isinstance(error, Broken) else f"{type(error).__name__}: {error}"
