"""A scheduler without a runner: the tests launch and settle by hand, and the SPI's PlanChecker judges every plan."""

from collections import deque
from collections.abc import Sequence

from runnerd_service.engine.kv_cache import BlockManager
from runnerd_service.engine.messages import AddRequest, Sampling
from runnerd_service.engine.request import RequestState, request_from
from runnerd_service.engine.scheduler import ScheduledStep, Scheduler
from runnerd_service.engine.settle import Settler
from runnerd_spi import PlanChecker, RowOutput, StepOutput

SIZE = 4
VOCAB = 100
MAX_MODEL_LEN = 64


class Bench:
    """A scheduler whose steps resolve when the test says so; each sampled token is 7."""

    def __init__(
        self,
        *,
        num_blocks: int = 32,
        max_num_seqs: int = 4,
        budget: int = 16,
        prefix_caching: bool = True,
        ageing_ns: int = 0,
    ) -> None:
        self.ageing_ns = ageing_ns
        self.blocks = BlockManager(num_blocks, SIZE)
        self.scheduler = Scheduler(
            self.blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, prefix_caching=prefix_caching
        )
        self.settler = Settler(self.scheduler, VOCAB)
        self.checker = PlanChecker(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            block_size=SIZE,
            num_blocks=num_blocks,
            vocab_size=VOCAB,
        )
        self.launched: deque[ScheduledStep] = deque()
        self.num_arrivals = 0

    def add(
        self,
        prompt: Sequence[int] | int,
        max_tokens: int = 8,
        priority: int = 0,
        eos: tuple[int, ...] = (),
        arrival_ns: int = 0,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        cache_salt: str = "",
        adapter_id: str | None = None,
    ) -> RequestState:
        tokens = tuple(prompt) if isinstance(prompt, Sequence) else (self.num_arrivals,) * prompt
        message = AddRequest(
            self.num_arrivals,
            tokens,
            sampling,
            max_tokens,
            priority=priority,
            arrival_ns=arrival_ns,
            eos_token_ids=eos,
            cache_salt=cache_salt,
            adapter_id=adapter_id,
        )
        request = request_from(message, self.num_arrivals, MAX_MODEL_LEN, self.ageing_ns)
        self.num_arrivals += 1
        self.scheduler.add(request)
        return request

    def launch(self) -> ScheduledStep | None:
        step = self.scheduler.schedule()
        if step is None and not self.launched and self.scheduler.has_releases:
            step = self.scheduler.schedule_releases()
        if step is not None:
            self.checker.apply(step.plan)
            self.launched.append(step)
            self.scheduler.check_integrity()
        return step

    def fail(self, error: str = "broken") -> None:
        """The oldest launched step gives no result."""
        self.settler.fail(self.launched.popleft(), error)
        self.scheduler.check_integrity()

    def settle(self, token_id: int = 7) -> None:
        step = self.launched.popleft()
        rows = tuple(RowOutput(token_id if row.sample else None) for row in step.plan.rows)
        self.settler.settle(step, StepOutput(step.plan.step_id, rows))
        self.scheduler.check_integrity()

    def run(self) -> ScheduledStep | None:
        """One step, launched and settled."""
        step = self.launch()
        if step is not None:
            self.settle()
        return step

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_requests or bool(self.launched) or self.scheduler.has_releases


def row_sizes(step: ScheduledStep | None) -> dict[int, int]:
    """Tokens per request uid."""
    assert step is not None
    return {request.uid: row.num_new_tokens for request, row in zip(step.requests, step.plan.rows, strict=True)}
