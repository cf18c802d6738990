"""The rules of the SPI as data: number, sentence, and what to do about a runner that breaks one.

What is said here is what a report shows; how a rule is checked is in the ``checks_*`` modules.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule."""

    id: str
    title: str
    """What holds of every runner."""
    remedy: str
    """Where to look first when it does not."""
    needs: tuple[str, ...] = ()
    """Rules without which this one cannot be judged: what breaks them would break it as well."""


_LIFE = ("L1", "L5")
_STEPS = (*_LIFE, "E2", "E3", "E5")

RULES: tuple[Rule, ...] = (
    Rule(
        "P1",
        "The plug-in is data: cheap to import, complete, and true to its types",
        "Import frameworks inside `create`, not at the top of the plug-in's module; see RunnerPlugin.",
    ),
    Rule(
        "L1",
        "Calls come in one order; a call in a wrong state raises LifecycleError and changes nothing",
        "Begin each call with Lifecycle.expect, before anything is touched.",
        ("P1", "L5"),
    ),
    Rule(
        "L2",
        "close is legal in every state and twice, waits for launched work, ends in bounded time, and is final",
        "Make close idempotent; wait for the device with a time-out; keep handed-out handles readable.",
        ("L1",),
    ),
    Rule(
        "L3",
        "load reports progress, tells what it found, and refuses what it cannot read with ModelLoadError",
        "Turn whatever reading the model raises into a ModelLoadError that says why and what to do.",
        ("P1",),
    ),
    Rule(
        "L4",
        "profile gives a usable budget; init_kv_cache refuses a number of blocks that cannot be and changes nothing",
        "Check num_blocks before anything is allocated, and raise RunnerError or ValueError.",
        ("L1",),
    ),
    Rule(
        "S0",
        "The same request gives the same tokens each time",
        "Derive randomness from (seed, output index) alone: no random stream of the runner's own, no clock, no memory.",
        ("P1",),
    ),
    Rule(
        "L5",
        "warm_up leaves no trace: the first plan is step 0, each slot is free at epoch 0, no token is left behind",
        "Warm up on tables of its own, or clear them afterwards.",
        ("P1", "S0"),
    ),
    Rule(
        "E1",
        "execute_model does not wait for its own step when more than one may be in flight",
        "Enqueue the forward, the sampling and the copy, and return: no .item(), no synchronize, no blocking copy.",
        (*_STEPS, "E4", "S1"),
    ),
    Rule(
        "E2",
        "A step is resolved at the latest by the call that needs its place",
        "At the end of execute_model, wait for the oldest step if max_in_flight are unresolved.",
        _LIFE,
    ),
    Rule(
        "E3",
        "Steps resolve in order; a result answers its plan, and is the same object each time and in each thread",
        "Run steps on one in-order stream; build the output once, under a lock, and keep it in the handle.",
        (*_LIFE, "E2"),
    ),
    Rule(
        "E4",
        "The timeline is complete once the step is done, in order, and read from time.monotonic_ns",
        "Take host times with time.monotonic_ns and map device times to the same clock.",
        (*_LIFE, "E3"),
    ),
    Rule(
        "E5",
        "A plan that breaks the contract raises PlanError and changes nothing",
        "Hand each plan to PlanChecker.apply before anything else.",
        _LIFE,
    ),
    Rule(
        "E6",
        "What the configuration allows is served: one token, no rows, all slots, the token budget, max_model_len",
        "Size every table for max_num_seqs, max_num_batched_tokens and the max_model_len that load returned.",
        (*_STEPS, "S1"),
    ),
    Rule(
        "S1",
        "Exactly the rows with `sample` return a token, and later rows read it; the others change nothing",
        "Sample for rows whose `sample` is set, and for no others; write each sampled token into the token table, "
        "behind the row's last position, and count it as an output.",
        _STEPS,
    ),
    Rule(
        "S2",
        "A token is a function of the request alone: batch, slot, depth, chunks and restart change nothing",
        "Derive randomness from (seed, output index), and read inputs from the request's own table and blocks.",
        (*_STEPS, "S1"),
    ),
    Rule(
        "S3",
        "Penalties, bans and min_tokens at output i see outputs 0 to i-1, whatever is unresolved",
        "Read the history where the tokens are written (on the device), not from a host copy that lags behind.",
        (*_STEPS, "S1", "S2", "C1"),
    ),
    Rule(
        "S4",
        "Every token id that crosses the SPI is in the vocabulary: no -1, no placeholder",
        "Return None where there is nothing; drop padding from lists of alternatives.",
        (*_STEPS, "S1"),
    ),
    Rule(
        "S5",
        "A consumed plan is let go of, a slot and its blocks are reused clean, and results belong to the caller",
        "Copy what you need out of a plan; reset a slot's state when it is admitted; hand out fresh outputs.",
        (*_STEPS, "S1", "S2", "S3"),
    ),
    Rule(
        "S6",
        "A row error fails that row only; a fatal step error is raised by every later step, at once, with one cause",
        "Put a row's error into RowOutput.failure; remember the first fatal error and raise from it ever after.",
        (*_STEPS, "S1", "S2"),
    ),
    Rule(
        "S7",
        "Launched work is never cancelled: a release lets it run on, and its late token reaches no new request",
        "Apply releases in stream order, and key whatever is written late by (slot, epoch).",
        (*_STEPS, "S1", "S2", "S5"),
    ),
    Rule(
        "S8",
        "At idle nothing is left: no admitted request, no sampling parameters, no outputs are kept",
        "Drop a slot's state with its release and a handle with its step.",
        (*_STEPS, "S1", "S5"),
    ),
    Rule(
        "S9",
        "A time-out of result raises StepTimeout and leaves the handle valid",
        "Wait with the caller's time-out and change nothing when it is over.",
        (*_LIFE, "E2", "E3"),
    ),
    Rule(
        "C1",
        "What the capabilities declare as served has the effect its name says",
        "Serve the parameter, or declare it `no`.",
        (*_STEPS, "S1", "S2"),
    ),
    Rule(
        "C2",
        "What the capabilities deny has no effect, and a configuration outside of them is refused",
        "Declare what you serve; check max_in_flight, block_size and dtype in `create` or `load`.",
        (*_STEPS, "S2"),
    ),
    Rule(
        "C3",
        "Log-probabilities are those of the raw logits: complete, ordered, of the right tokens",
        "Take them before penalties, bias and temperature; one record per token or prompt position.",
        (*_STEPS, "S1", "S2", "S4"),
    ),
    Rule(
        "C4",
        "A row with a mask chooses among the tokens that it allows, before all else; no other row is touched",
        "Set the other tokens' logits to minus infinity before penalties and bias, or declare guided_decoding `no`.",
        (*_STEPS, "S1", "S2", "S5", "S6"),
    ),
    Rule(
        "T1",
        "In random traces each request gets what it gets alone: arrivals, cancels, preemption, prefixes, depths",
        "Every simpler rule holds, so look at what the smallest trace combines.",
        (*_STEPS, "S1", "S2", "S3", "S4", "S5", "S6", "S7", "C1"),
    ),
)

BY_ID = {rule.id: rule for rule in RULES}


def all_needs(rule: Rule) -> frozenset[str]:
    """Give the rules that a rule needs, and those that these need."""
    found: set[str] = set()
    waiting = list(rule.needs)
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += BY_ID[one].needs
    return frozenset(found)
