"""torch.compile on fake tensors: the compiler's own partition and kernels, and the memory that its code takes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from tests.architectures import tiny_model
from tests.backends.pytorch.techniques.checkpointing.checkpointing_cases import Recorder
from tests.failing import failing
from tightfit.backends.pytorch.blocks import find_stacks
from tightfit.backends.pytorch.follow.tracker import Scratch
from tightfit.backends.pytorch.simulate.compiled import inductor_schedule
from tightfit.backends.pytorch.simulate.compiled.region_schedule import Kernel, Output, Schedule, Storage
from tightfit.backends.pytorch.simulate.compiled.regions import Planned, Regions, compiling_for
from tightfit.backends.pytorch.techniques.checkpointing.memory_budget import memory_budget
from tightfit.backends.pytorch.techniques.checkpointing.recomputation import compile_module, recompute
from tightfit.devices import Device
from tightfit.trace import Op, OpClass, Phase

pytestmark = [
    pytest.mark.usefixtures("few_objects"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
ROWS, LENGTH, WIDTH = 4, 24, 32
F32 = 4


class Quiet(Recorder):
    """Counts allocations, and lets the compiler work."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


@contextmanager
def planning() -> Iterator[None]:
    with FakeTensorMode(), compiling_for(FakeTensorMode):
        yield


@dataclass
class Seen:
    """A call of a compiled graph, and the kernels that it launched."""

    direction: str
    sure: str
    kernels: list[Op] = field(default_factory=list)


def no_scratch(*_: object) -> int:
    return 0


class Calls(Regions, list[Seen]):
    """Calls of compiled graphs; of each the most bytes alive as a kernel ran, where `recorder` counts them."""

    recorder: Quiet | None = None

    def __init__(self, *, gpu: bool = False, scratch: Scratch = no_scratch) -> None:
        super().__init__(Device(kind="cuda" if gpu else "cpu", name="", memory_bytes=0), scratch)
        self.peaks: list[int] = []

    def begin(self, direction: str, sure: str, args: object) -> AbstractContextManager[None]:
        self.append(Seen(direction, sure))
        self.peaks.append(0)
        return nullcontext()

    def launch(self, kernel: Kernel) -> None:
        self[-1].kernels.append(kernel.op)
        if self.recorder is not None:
            self.peaks[-1] = max(self.peaks[-1], self.recorder.bytes + kernel.scratch)


def compiled(
    function: Callable[..., Tensor], *, backend: str = "inductor", mode: str = "default", **options
) -> tuple[Callable[..., Tensor], Calls]:
    calls = Calls(**options)
    return torch.compile(function, backend=calls.backend(backend, mode)), calls


class Step:
    """A planned training step of GPT-2 with compiled blocks. Weights stand outside of all counts."""

    def __init__(self, *, budget: float | None = None, checkpointed: bool = False, dropout: float = 0.0) -> None:
        self.calls = Calls()
        schedule = inductor_schedule.inductor_schedule
        counted = mock.patch.object(inductor_schedule, "inductor_schedule", wraps=schedule)
        with planning(), counted as made, nullcontext() if budget is None else memory_budget(budget):
            self.model = tiny_model("gpt2", resid_pdrop=dropout, use_cache=False).train()
            blocks = find_stacks(self.model)[0]
            if checkpointed:
                recompute(self.model, [[block] for block in blocks])
            for block in blocks:
                compile_module(block, backend=self.calls.backend("inductor", "default"))
            ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
            with Quiet() as self.recorder:
                loss = self.model(input_ids=ids).logits.sum()
                self.saved = self.recorder.bytes
                loss.backward()
            self.graphs = made.call_count
            del loss, ids
            gc.collect()

    def flops(self, direction: str) -> int:
        return sum(kernel.flops for call in self.calls if call.direction == direction for kernel in call.kernels)


@pytest.fixture(scope="module")
def step() -> Step:
    return Step()


def test_equal_blocks_share_one_compilation(step):
    assert step.graphs == 2
    assert [call.direction for call in step.calls] == ["forward"] * 2 + ["backward"] * 2


def test_gradients_have_their_parameters_shapes(step):
    for parameter in step.model.parameters():
        assert type(parameter.grad).__name__ == "FakeTensor"
        assert parameter.grad.shape == parameter.shape
        assert parameter.grad.dtype == parameter.dtype


def test_after_the_backward_pass_only_gradients_are_left(step):
    assert step.recorder.bytes == sum(p.numel() * F32 for p in step.model.parameters())


def test_matrix_products_are_counted_from_their_shapes(step):
    tokens = ROWS * LENGTH
    products = 2 * tokens * WIDTH * 12 * WIDTH
    scores = 2 * 2 * ROWS * LENGTH * LENGTH * WIDTH  # the model's own mask hides pairs, and saves no work
    assert step.flops("forward") == 2 * (products + scores)
    assert step.flops("backward") == 2 * (2 * products + 5 * scores // 2)


def test_every_kernel_says_what_it_is(step):
    for call in step.calls:
        assert {op.op_class for op in call.kernels} >= {OpClass.CONTRACTION, OpClass.NORMALIZATION}
        assert all(op.bytes_read + op.bytes_written > 0 and op.name for op in call.kernels)
        assert call.sure == "Inductor's own schedule of fused kernels"


def test_less_is_saved_under_a_smaller_budget():
    assert Step(budget=0.0).saved < 0.6 * Step(budget=1.0).saved


def test_checkpointed_blocks_save_little_and_compute_again(step):
    checkpointed = Step(checkpointed=True, dropout=0.1)
    assert checkpointed.saved < 0.5 * step.saved
    assert checkpointed.flops("forward") == step.flops("forward")
    assert checkpointed.flops("backward") > step.flops("backward")
    assert checkpointed.recorder.bytes == step.recorder.bytes


def test_without_inductors_schedule_the_graphs_ops_run_one_by_one(step, monkeypatch):
    changed = failing(AttributeError("no such thing\nin this version"))
    monkeypatch.setattr(inductor_schedule, "inductor_schedule", changed)
    fallback = Step()
    assert fallback.saved == step.saved
    assert fallback.recorder.bytes == step.recorder.bytes
    assert all(call.sure.endswith("could not be read (AttributeError: no such thing)") for call in fallback.calls)
    assert step.recorder.ops["aten::addmm"] == 0 < fallback.recorder.ops["aten::addmm"]


def test_a_chain_of_elementwise_ops_is_one_kernel_with_nothing_between():
    with planning(), torch.no_grad():
        function, calls = compiled(lambda x: (x.sin() * 2 + 1).exp())
        x = torch.empty(1000, 16)
        with Quiet() as calls.recorder:
            function(x)
    (call,) = calls
    (kernel,) = call.kernels
    assert (kernel.bytes_read, kernel.bytes_written) == (x.nbytes, x.nbytes)
    assert kernel.flops == 0
    assert calls.peaks == [x.nbytes]  # the result alone


def test_scratch_is_what_lies_between_inputs_and_outputs():
    with planning(), torch.no_grad():
        function, calls = compiled(lambda x, w, v: (x @ w).relu() @ v)
        x, w, v = torch.empty(64, 16), torch.empty(16, 256), torch.empty(256, 8)
        with Quiet() as calls.recorder:
            assert function(x, w, v).shape == (64, 8)
    (call,) = calls
    assert calls.peaks == [64 * (256 + 8) * F32]  # relu is written over the product
    assert calls.recorder.bytes == 0
    assert sum(kernel.flops for kernel in call.kernels) == 2 * 64 * 256 * (16 + 8)


def test_what_a_librarys_kernel_takes_for_itself_counts():
    def scratch(func, args, kwargs, result) -> int:
        return 10_000 if func is torch.ops.aten.mm.default else 0

    with planning(), torch.no_grad():
        function, calls = compiled(lambda x, w: x @ w, scratch=scratch)
        x, w = torch.empty(8, 16), torch.empty(16, 4)
        with Quiet() as calls.recorder:
            function(x, w)
    assert calls.peaks == [8 * 4 * F32 + 10_000]


def test_outputs_share_memory_where_the_graph_says_so():
    with planning(), torch.no_grad():
        function, _ = compiled(lambda x: (x, x.t(), (y := x * 2), y[1:], y.sum()))
        x = torch.empty(6, 4)
        same, turned, made, part, total = function(x)
    assert same is x
    assert (turned.shape, turned.stride()) == ((4, 6), (1, 4))
    assert turned.untyped_storage() == x.untyped_storage()
    assert made.untyped_storage() != x.untyped_storage()
    assert (part.shape, part.storage_offset()) == ((5, 4), 4)
    assert part.untyped_storage() == made.untyped_storage()
    assert total.shape == ()


def test_weights_are_saved_without_a_copy():
    with planning():
        layer = nn.Linear(64, 256, bias=False)
        function, _ = compiled(lambda x: layer(x).relu())
        x = torch.empty(2, 64, requires_grad=True)
        with Quiet() as recorder:
            y = function(x)
            assert recorder.bytes <= y.nbytes * 1.5  # the output, and which of its elements are positive
            y.sum().backward()
    assert x.grad.shape == x.shape
    assert layer.weight.grad.shape == (256, 64)


def test_a_graph_with_sizes_that_are_not_known_runs_op_by_op():
    with planning(), torch.no_grad():
        calls = Calls()
        backend = calls.backend("inductor", "default")
        function = torch.compile(lambda x, w: (x @ w).relu(), backend=backend, dynamic=True)
        assert function(torch.empty(8, 16), torch.empty(16, 32)).shape == (8, 32)
    assert calls[0].sure.startswith("its ops one by one")


def test_a_size_that_is_new_is_compiled_by_itself():
    with planning(), torch.no_grad():
        function, calls = compiled(lambda x: x.exp())
        assert [function(torch.empty(rows, 3)).shape[0] for rows in (4, 4, 3)] == [4, 4, 3]
    assert [call.kernels[0].bytes_read for call in calls] == [48, 48, 36]


def test_a_gpus_kernels_are_fused_by_its_own_rules():
    def function(x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        return torch.nn.functional.dropout(x - mean, 0.5, True).softmax(-1)

    counts = {}
    for gpu in (False, True):
        with planning(), torch.no_grad():
            planned, calls = compiled(function, gpu=gpu)
            planned(torch.empty(64, 128))
        counts[gpu] = len(calls[0].kernels)
        assert ("GPU" in calls[0].sure) is gpu
    assert counts[True] <= counts[False]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "cudagraphs"])
def test_backends_that_generate_no_code_run_op_by_op(backend):
    with planning():
        function, calls = compiled(lambda x: (x.sin() * 2).exp(), backend=backend)
        x = torch.empty(8, requires_grad=True)
        with Quiet() as recorder:
            function(x).sum().backward()
    assert not calls
    assert recorder.ops["aten::sin"] == recorder.ops["aten::exp"] == 1
    assert x.grad.shape == x.shape


def test_what_cannot_be_known_is_said():
    with planning(), torch.no_grad():
        function, calls = compiled(lambda x: x.exp(), gpu=True, mode="max-autotune")
        function(torch.empty(4))
    assert "max-autotune" in calls[0].sure
    assert "CUDA graphs" in calls[0].sure


def test_everything_is_put_back_after_an_error():
    class Failing(Calls):
        def launch(self, kernel: Kernel) -> None:
            raise RuntimeError("in the report")

    modes = torch._C._len_torch_dispatch_stack()
    with pytest.raises(RuntimeError, match="in the report"), planning():
        torch.compile(lambda x: x.exp(), backend=Failing().backend("inductor", "default"))(torch.empty(4))
    assert torch._C._len_torch_dispatch_stack() == modes
    assert torch._subclasses.FakeTensorMode is FakeTensorMode
    assert torch._dynamo.config.automatic_dynamic_shapes
    x = torch.ones(4)
    assert torch.compile(lambda x: x + 1, backend="eager")(x).equal(x + 1)


def test_arguments_are_freed_once_they_are_read_for_the_last_time():
    def storage(count: int, born: int, dies: int | None) -> Storage:
        cpu = torch.device("cpu")
        return Storage(size=(count,), stride=(1,), dtype=torch.float32, device=cpu, born=born, dies=dies)

    class Alive(Calls):
        def launch(self, kernel: Kernel) -> None:
            assert self.recorder is not None
            self.peaks.append(self.recorder.bytes + kernel.scratch)

    kernel = Op(name="", tick=0, phase=Phase.FORWARD, op_class=OpClass.OTHER)
    schedule = Schedule(
        kernels=(Kernel(0, kernel, 0), Kernel(1, kernel, 7), Kernel(2, kernel, 0)), steps=3,
        storages=(storage(10, 0, 1), storage(5, 1, None), storage(30, 2, 2)), last_uses=(0, 2),
        outputs=(Output(kind="storage", index=1, size=(5,), stride=(1,)),), sure="",
    )  # fmt: skip
    calls = Alive()
    with FakeTensorMode(), Quiet() as calls.recorder:
        (output,) = Planned(calls, "").run("forward", schedule, [torch.empty(100), torch.empty(1000)])
        assert calls.recorder.bytes == output.nbytes == 5 * F32
    assert calls.peaks[1:] == [(100 + 1000 + 10) * F32, (1000 + 10 + 5) * F32 + 7, (1000 + 5 + 30) * F32]
