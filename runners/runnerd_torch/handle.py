"""A launched step as the engine sees it, and the memory of the first fatal failure."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace

from runnerd_spi import RowOutput, StepFailed, StepOutput, StepTimeline, StepTimeout
from runnerd_torch.devices.base import Launch
from runnerd_torch.execution import StepResult
from runnerd_torch.inputs import StepInputs
from runnerd_torch.sampling import SamplingBatch, row_outputs, token_logprobs


class StepSkipped(Exception):
    """The step was not run because an earlier one failed."""


class FailureLatch:
    """Keeps the first error of any step; every step after it fails with the same cause."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cause: BaseException | None = None
        self._step_id = -1

    def run(self, step_id: int, work: Callable[[], StepResult]) -> StepResult:
        """Do ``work`` unless a step failed before; remember the error if this one does.

        Raises:
            StepSkipped: A step failed before.
        """
        if self._cause is not None:
            raise StepSkipped
        try:
            return work()
        except Exception as error:
            self.record(step_id, error)
            raise

    def record(self, step_id: int, error: BaseException) -> None:
        """Remember ``error`` as the cause, unless there is one already."""
        with self._lock:
            if self._cause is None:
                self._cause, self._step_id = error, step_id

    def check(self) -> None:
        """Raise the failure if there is one.

        Raises:
            StepFailed: Fatal, with the first error as its cause.
        """
        with self._lock:
            cause, step_id = self._cause, self._step_id
        if cause is not None:
            raise StepFailed(
                f"step {step_id} failed with {type(cause).__name__}: {cause}; the runner has to be restarted",
                fatal=True,
            ) from cause


class TorchStepHandle:
    """A step on the device's stream.

    Args:
        step_id: The plan's.
        launch: The device's work.
        assemble: Makes the output of the work's result.
        latch: Where failures are kept.
        timeline: The host's two times.
    """

    def __init__(
        self,
        step_id: int,
        launch: Launch[StepResult],
        assemble: Callable[[StepResult], StepOutput],
        latch: FailureLatch,
        timeline: StepTimeline,
    ) -> None:
        self._step_id = step_id
        self._launch = launch
        self._assemble = assemble
        self._latch = latch
        self._timeline = timeline
        self._lock = threading.Lock()
        self._output: StepOutput | None = None

    @property
    def step_id(self) -> int:
        """The plan's step id."""
        return self._step_id

    @property
    def timeline(self) -> StepTimeline:
        """Complete once ``done()``."""
        if not self._launch.done():
            return self._timeline
        return replace(
            self._timeline,
            device_begin_ns=self._launch.begin_ns,
            device_end_ns=self._launch.compute_end_ns,
            ready_ns=self._launch.end_ns,
        )

    def done(self) -> bool:
        """Whether ``result`` returns or raises at once."""
        return self._launch.done()

    def settle(self) -> None:
        """Wait for the step, whatever its outcome; a failure is remembered."""
        self._launch.wait()
        try:
            self._launch.value()
        except Exception as error:  # noqa: BLE001 - whoever asks for the result gets it
            self._latch.record(self._step_id, error)

    def result(self, timeout: float | None = None) -> StepOutput:
        """Wait for the step and give its output; the same object each time.

        Raises:
            StepTimeout: The time is over; ask again.
            StepFailed: This step or one before it failed; always fatal.
        """
        if not self._launch.wait(timeout):
            raise StepTimeout(f"step {self._step_id} was not ready within {timeout} s; ask again")
        with self._lock:
            if self._output is None:
                self._output = self._read()
            return self._output

    def _read(self) -> StepOutput:
        try:
            return self._assemble(self._launch.value())
        except Exception as error:
            self._latch.record(self._step_id, error)
            self._latch.check()
            raise


def assemble_output(step_id: int, inputs: StepInputs, batch: SamplingBatch, result: StepResult) -> StepOutput:
    """Give the SPI's output of a step whose tensors are in host memory."""
    rows = [RowOutput()] * inputs.num_rows
    if result.sampled is not None:
        for row, output in zip(inputs.sampled_rows, row_outputs(batch, result.sampled), strict=True):
            rows[row] = output
    for span, tensors in zip(inputs.prompt_spans, result.prompt, strict=True):
        records = token_logprobs(tensors)
        if rows[span.row].failure is not None:
            continue
        if any(math.isnan(record.logprob) for record in records):
            rows[span.row] = RowOutput(
                failure="the logits of a prompt token hold a NaN or an infinity; check the model's weights and dtype"
            )
        else:
            rows[span.row] = rows[span.row]._replace(prompt_logprobs=records)
    return StepOutput(step_id, tuple(rows))
