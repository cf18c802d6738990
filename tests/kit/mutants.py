"""Wrong runners, one for each rule: the reference with one real bug."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import numpy as np
from reference import (
    CAPABILITIES,
    TOKEN_MEMORY_CAPABILITIES,
    VOCAB_SIZE,
    ReferenceRunner,
    TokenMemoryRunner,
    plugin,
)

from runnerd_spi import (
    FutureStep,
    PlanError,
    RowOutput,
    RunnerOption,
    RunnerPlugin,
    StepFailed,
    StepOutput,
    StepPlan,
    StepTimeout,
)


class ProfilesTwice(ReferenceRunner):
    def profile(self):
        if self.lifecycle._next == 2:
            return None
        return super().profile()


class ClosesOnce(ReferenceRunner):
    def close(self):
        if self.lifecycle.closed:
            raise ValueError("closed already")
        super().close()


class LosesWorkAtClose(ReferenceRunner):
    def run_step(self, plan, host_begin):
        time.sleep(0.02)
        return super().run_step(plan, host_begin)

    def close(self):
        if self.lifecycle.close() and self.device is not None:
            self.device.shutdown(wait=False, cancel_futures=True)


class LetsFileNotFoundThrough(ReferenceRunner):
    def refuse_model(self):
        raise FileNotFoundError(self.config.model)


class TakesNoBlocks(ReferenceRunner):
    def check_num_blocks(self, num_blocks):
        pass


class WarmsUpOnStepZero(ReferenceRunner):
    def warm_up(self):
        super().warm_up()
        self.execute_model(StepPlan(0)).result(10)


class WaitsForItsStep(ReferenceRunner):
    def settle(self):
        self.unresolved.popleft().wait()


class WaitsForItsPenalties(ReferenceRunner):
    """Waits only when a row asks for a penalty, though it is declared as served on the device."""

    def execute_model(self, plan):
        handle = super().execute_model(plan)
        if any(state.admit.sampling_params.frequency_penalty for state in self.checker.slots.values()):
            handle.wait()
        return handle


class NeverSettles(ReferenceRunner):
    def settle(self):
        pass


class MakesResultsAnew(ReferenceRunner):
    class Handle(FutureStep):
        def result(self, timeout=None):
            output = super().result(timeout)
            return StepOutput(output.step_id, output.rows)

    def handle(self, step_id, future, begin):
        return self.Handle(step_id, future, begin)


class ReadsAnotherClock(ReferenceRunner):
    def now(self):
        return time.time_ns()


class RefusesByValueError(ReferenceRunner):
    def check_plan(self, plan):
        try:
            super().check_plan(plan)
        except PlanError as error:
            raise ValueError(str(error)) from error


class TakesHalfOfAWrongPlan(ReferenceRunner):
    """Applies what stands before the mistake: the number of the step, here."""

    def check_plan(self, plan):
        try:
            super().check_plan(plan)
        except PlanError:
            self.checker.next_step_id += 1
            raise


class HasAShortTable(ReferenceRunner):
    def table_length(self):
        return self.max_model_len - 2


class DrawsOnEveryRow(ReferenceRunner):
    """Counts rows instead of outputs, so a row without ``sample`` moves the random stream on."""

    def admit(self, admit):
        super().admit(admit)
        self.draws = getattr(self, "draws", {}) | {admit.slot: len(admit.token_ids) - admit.num_prompt_tokens - 1}

    def run_row(self, row, plan):
        self.draws[row.slot] += 1
        return super().run_row(row, plan)

    def uniform(self, slot, row, index, plan):
        return super().uniform(slot, row, self.draws[row.slot], plan)


class NeverWritesWhatItSamples(ReferenceRunner):
    def write(self, slot, position, token):
        pass


class DrawsFromOneStream(ReferenceRunner):
    """Has a random stream of its own, seeded once."""

    def uniform(self, slot, row, index, plan):
        self.stream = getattr(self, "stream", None) or np.random.default_rng(0)
        return float(self.stream.random())


class SamplesWithoutBeingAsked(ReferenceRunner):
    def output_without_sample(self, row, prompt_logprobs):
        return RowOutput(token_id=1, prompt_logprobs=prompt_logprobs)


class SeedsByTheSlot(ReferenceRunner):
    def uniform(self, slot, row, index, plan):
        return super().uniform(slot, row, index + 1000 * row.slot, plan)


class SeedsByTheStep(ReferenceRunner):
    def uniform(self, slot, row, index, plan):
        return super().uniform(slot, row, index + 1000 * len(plan.rows), plan)


class LagsBehindInItsHistory(ReferenceRunner):
    """Penalties come from a host copy, which lacks what is in flight."""

    def seen_outputs(self, outputs):
        return outputs[: len(outputs) - self.config.max_in_flight + 1] if self.config.max_in_flight > 1 else outputs


class PadsWithMinusOne(ReferenceRunner):
    def shown(self, logprobs):
        if logprobs is None or len(logprobs.top) < 5:
            return logprobs
        return replace(logprobs, top=(*logprobs.top[:4], (-1, float("-inf"))))


class KeepsCountsOfTheSlot(ReferenceRunner):
    """The counts of a slot's former request are not reset."""

    def counts(self, slot, outputs):
        self.kept = getattr(self, "kept", {})
        former, length = self.kept.get(slot, (np.zeros(VOCAB_SIZE, dtype=np.int64), 0))
        if len(outputs) < length:
            former = former + self.last[slot]
        self.last = getattr(self, "last", {}) | {slot: np.bincount(outputs, minlength=VOCAB_SIZE)}
        self.kept[slot] = (former, len(outputs))
        return former + self.last[slot]


class KeepsItsPlans(ReferenceRunner):
    def run_step(self, plan, host_begin):
        self.plans = [*getattr(self, "plans", []), plan]
        return super().run_step(plan, host_begin)


class ChangesItsResults(ReferenceRunner):
    """Hands out one output object and fills it anew."""

    def run_step(self, plan, host_begin):
        output, timeline = super().run_step(plan, host_begin)
        former = getattr(self, "former", None)
        if former is not None and former.rows and output.rows:
            object.__setattr__(former, "rows", output.rows[:1] * len(former.rows))
        self.former = output if plan.step_id % 7 == 3 else None
        return output, timeline


class FailsAnewEachTime(ReferenceRunner):
    def failure(self):
        return RuntimeError("the device is broken")


class GoesOnAfterAFailure(ReferenceRunner):
    def run_step(self, plan, host_begin):
        try:
            return super().run_step(plan, host_begin)
        finally:
            self.cause = None


class FailsTheWholeStep(ReferenceRunner):
    def choose(self, scores, params, uniform):
        token = super().choose(scores, params, uniform)
        if token is None:
            self.cause = RuntimeError("nothing is left to choose")
            raise self.cause
        return token


class WritesLate(ReferenceRunner):
    """Writes what a step sampled when the next one begins, to whoever then has the slot."""

    def write(self, slot, position, token):
        self.late = [*getattr(self, "late", []), (slot, position, token)]

    def run_row(self, row, plan):
        if row is plan.rows[0]:
            self.flush()
        return super().run_row(row, plan)

    def run_step(self, plan, host_begin):
        if not plan.rows:
            self.flush()
        return super().run_step(plan, host_begin)

    def flush(self):
        for slot, position, token in getattr(self, "late", []):
            self.tokens[slot, position] = token
        self.late = []


class KeepsItsAdmits(ReferenceRunner):
    def admit(self, admit):
        self.admits = [*getattr(self, "admits", []), admit]
        super().admit(admit)


class KeepsALittleOfEachRequest(ReferenceRunner):
    def admit(self, admit):
        self.bits = getattr(self, "bits", [])
        self.bits.append([admit.slot])
        super().admit(admit)


class GivesUpAfterATimeout(ReferenceRunner):
    class Handle(FutureStep):
        timed_out = False

        def result(self, timeout=None):
            if self.timed_out:
                raise StepFailed("the handle was given up", fatal=False)
            try:
                return super().result(timeout)
            except StepTimeout:
                self.timed_out = True
                raise

    def handle(self, step_id, future, begin):
        return self.Handle(step_id, future, begin)


class IgnoresMinP(ReferenceRunner):
    def min_p(self, params):
        return 0.0


class IgnoresBias(ReferenceRunner):
    def adjusted(self, logits, slot, row, outputs, history):
        bare = replace(slot, params=replace(slot.params, logit_bias={}))
        return super().adjusted(logits, bare, row, outputs, history)


class TakesAnyDepth(ReferenceRunner):
    def check_config(self, config):
        pass


class TellsAdjustedLogprobs(ReferenceRunner):
    def raw(self, logits, scores):
        return scores


class IgnoresMasks(ReferenceRunner):
    def masked(self, logits, row, plan):
        return logits


class MasksAllRows(ReferenceRunner):
    def masked(self, logits, row, plan):
        masks = tuple(one._replace(slot=row.slot) for one in plan.masks[:1])
        return super().masked(logits, row, replace(plan, masks=masks))


class TripsOverSeventeenTokens(ReferenceRunner):
    """Only a step of exactly seventeen tokens in more than two rows goes wrong."""

    def uniform(self, slot, row, index, plan):
        is_it = len(plan.rows) > 2 and sum(one.num_new_tokens for one in plan.rows) == 17
        return super().uniform(slot, row, index + 1 if is_it else index, plan)


class Hangs(ReferenceRunner):
    def execute_model(self, plan):
        if plan.step_id == 3:
            time.sleep(3600)
        return super().execute_model(plan)


class Crashes(ReferenceRunner):
    def execute_model(self, plan):
        if plan.step_id == 3:
            os.write(2, b"reference: the driver is gone\n")
            os._exit(70)
        return super().execute_model(plan)


class Chatters(ReferenceRunner):
    def execute_model(self, plan):
        print('{"rule_id": "L1", "status": "broken"}', flush=True)
        os.write(1, b"\x00\xff rubbish\n" * 50)
        return super().execute_model(plan)


class DoesNotComeUp(ReferenceRunner):
    def load(self, progress):
        raise OSError("no such device")


WRONG_DEFAULT = RunnerPlugin(
    "reference", "for the tests", CAPABILITIES, ReferenceRunner, (RunnerOption("threads", int, "four", "threads"),)
)


class TakesGrantsItHasNoUseFor(TokenMemoryRunner):
    def check_plan(self, plan):
        super().check_plan(replace(plan, grants=()))


MUTANTS: dict[str, list[RunnerPlugin]] = {
    "P1": [
        WRONG_DEFAULT,
        plugin(ReferenceRunner, replace(CAPABILITIES, max_in_flight=0)),
        plugin(TokenMemoryRunner, replace(TOKEN_MEMORY_CAPABILITIES, prefix_caching="device")),
    ],
    "L1": [plugin(ProfilesTwice)],
    "L2": [plugin(ClosesOnce), plugin(LosesWorkAtClose)],
    "L3": [plugin(LetsFileNotFoundThrough)],
    "L4": [plugin(TakesNoBlocks)],
    "L5": [plugin(WarmsUpOnStepZero)],
    "E1": [plugin(WaitsForItsStep), plugin(WaitsForItsPenalties)],
    "E2": [plugin(NeverSettles)],
    "E3": [plugin(MakesResultsAnew)],
    "E4": [plugin(ReadsAnotherClock)],
    "E5": [
        plugin(RefusesByValueError),
        plugin(TakesHalfOfAWrongPlan),
        plugin(TakesGrantsItHasNoUseFor, TOKEN_MEMORY_CAPABILITIES),
    ],
    "E6": [plugin(HasAShortTable)],
    "S0": [plugin(DrawsFromOneStream)],
    "S1": [plugin(DrawsOnEveryRow), plugin(SamplesWithoutBeingAsked), plugin(NeverWritesWhatItSamples)],
    "S2": [plugin(SeedsByTheSlot), plugin(SeedsByTheStep)],
    "S3": [plugin(LagsBehindInItsHistory)],
    "S4": [plugin(PadsWithMinusOne)],
    "S5": [plugin(KeepsCountsOfTheSlot), plugin(KeepsItsPlans), plugin(ChangesItsResults)],
    "S6": [plugin(FailsAnewEachTime), plugin(GoesOnAfterAFailure), plugin(FailsTheWholeStep)],
    "S7": [plugin(WritesLate)],
    "S8": [plugin(KeepsItsAdmits), plugin(KeepsALittleOfEachRequest)],
    "S9": [plugin(GivesUpAfterATimeout)],
    "C1": [plugin(IgnoresMinP), plugin(IgnoresBias)],
    "C2": [plugin(TakesAnyDepth), plugin(ReferenceRunner, replace(CAPABILITIES, frequency_penalty="no"))],
    "C3": [plugin(TellsAdjustedLogprobs)],
    "C4": [plugin(IgnoresMasks), plugin(MasksAllRows)],
    "T1": [plugin(TripsOverSeventeenTokens)],
}

HANGS, CRASHES, CHATTERS, DOES_NOT_COME_UP = map(plugin, (Hangs, Crashes, Chatters, DoesNotComeUp))
