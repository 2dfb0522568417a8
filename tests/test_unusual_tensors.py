"""What a candidate does with tensors that are not plain: its own ValueError or the right answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import layer_norm

from kbsub.eval.declarations import read_declarations
from kbsub.eval.host_executor import SMALL_LIMITS, host_namespace

sys.path.insert(0, str(Path(__file__).parent))
from host_run import DTYPES

FOLDERS = [
    Path(__file__).resolve().parents[1] / "submissions" / name for name in ("level1_40", "local_layernorm_tokens")
]
FILES = {stem: (folder / f"{stem}.py", row) for folder in FOLDERS for stem, row in read_declarations(folder).items()}
TRACED = ("native_torchscript", "native_affine_split_torchscript", "split_torchscript")
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2}


def space_of(stem: str) -> dict[str, Any]:
    """The file executed as it is: its kernels stay where a test does not get that far."""
    space: dict[str, Any] = {}
    exec(compile(FILES[stem][0].read_text("utf-8"), "<string>", "exec"), space)
    return space


def dtype_of(stem: str) -> torch.dtype:
    return DTYPES[FILES[stem][1].precision[0]]


def hosted(stem: str, size: Any) -> Any:
    space = host_namespace(FILES[stem][0].read_text("utf-8"), SMALL_LIMITS)
    return space["ModelNew"](size).to(dtype_of(stem))


def randomised(model: Any) -> Any:
    with torch.no_grad():
        model.ln.weight.normal_()
        model.ln.bias.normal_()
    return model


def expected(x: torch.Tensor, model: Any) -> torch.Tensor:
    ln = model.ln
    sizes = tuple(ln.normalized_shape)
    return layer_norm(x.double(), sizes, ln.weight.detach().double(), ln.bias.detach().double(), ln.eps)


# A tensor that is not strided -> how its error names it. Nested tensors of the older kind have no shape to ask for.
NOT_STRIDED = {
    "sparse": (lambda x: x.to_sparse(), "torch.sparse_coo"),
    "compressed": (lambda x: x.to_sparse_csr(), "torch.sparse_csr"),
    "nested": (lambda x: torch.nested.nested_tensor([x[0], x[1]]), "nested"),
    "jagged": (lambda x: torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged), "nested"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch: prototypes, beta
@pytest.mark.parametrize("kind", NOT_STRIDED)
@pytest.mark.parametrize("stem", FILES)
def test_a_tensor_that_is_not_strided_is_refused_by_name(stem: str, kind: str) -> None:
    make, word = NOT_STRIDED[kind]
    model = space_of(stem)["ModelNew"](8).to(dtype_of(stem))
    with pytest.raises(ValueError, match=rf"^x: {word}, must be an ordinary \(strided\) tensor"):
        model(make(torch.randn(3, 8, dtype=dtype_of(stem))))


@pytest.mark.parametrize("stem", FILES)
def test_a_sparse_parameter_is_refused_by_name(stem: str) -> None:
    model = space_of(stem)["ModelNew"](8).to(dtype_of(stem))
    model.ln.bias = torch.nn.Parameter(model.ln.bias.detach().to_sparse())
    with pytest.raises(ValueError, match=r"^bias: torch.sparse_coo, must be an ordinary"):
        model(torch.randn(3, 8, dtype=dtype_of(stem)))


@pytest.mark.parametrize("stem", FILES)
def test_normalized_shape_may_be_a_list(stem: str) -> None:
    model = randomised(hosted(stem, (64,)))
    model.ln.normalized_shape = [64]
    x = torch.randn(3, 64, dtype=dtype_of(stem))
    tolerance = TOLERANCE[x.dtype] if FILES[stem][1].expect.official == "pass" else 0.1  # sums in half, declared so
    torch.testing.assert_close(model(x).double(), expected(x, model), atol=tolerance, rtol=tolerance)


# ---- oracle_accurate, the one file that copies what is not contiguous ----

ROWS, WIDTH = 2**30, 2**20  # 2^52 bytes: more than any address space has room for


@pytest.mark.parametrize(
    ("device_type", "words"),
    [
        ("cuda", "x: on cpu, must be on cuda"),  # checked before it is copied
        (
            "cpu",
            rf"x: strides \(0, 0\), must be .* room for a contiguous copy of {4 * ROWS * WIDTH} bytes",
        ),
    ],
)
def test_what_is_expanded_beyond_memory_is_refused_in_words(device_type: str, words: str) -> None:
    space = space_of("oracle_accurate")
    space["DEVICE_TYPE"] = device_type
    space["cuda_module"], space["device_limits"] = (lambda *_: None), (lambda _: SMALL_LIMITS)
    model = space["ModelNew"](WIDTH)
    with pytest.raises(ValueError, match=words):
        model(torch.zeros(1, 1).expand(ROWS, WIDTH))


def test_more_rows_than_an_int_counts_are_refused_in_words() -> None:
    space = space_of("oracle_accurate")
    space["DEVICE_TYPE"] = "cpu"
    with pytest.raises(ValueError, match=r"x: 2147483648 rows, must be at most 2147483632"):
        space["ModelNew"](8)(torch.zeros(1, 8).expand(2**31, 8))


# x (2, 4, 16) -> the same values in another layout, which is copied before it is read.
COPIED = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "expanded": lambda x: x[:1].expand(5, 4, 16),
    "every other element": lambda x: torch.stack([x, x + 1], dim=-1)[..., 0],
}


@pytest.mark.parametrize("layout", COPIED)
def test_a_copy_gives_the_bits_of_the_plain_tensor(layout: str) -> None:
    model = randomised(hosted("oracle_accurate", (4, 16)))
    x = COPIED[layout](torch.randn(2, 4, 16))
    assert not x.is_contiguous()
    y = model(x)
    assert y.is_contiguous() and torch.equal(y, model(x.contiguous()))


def test_a_transposed_parameter_is_read_as_it_is() -> None:
    model = randomised(hosted("oracle_accurate", (8, 8)))
    model.ln.weight = torch.nn.Parameter(model.ln.weight.detach().t())
    x = torch.randn(3, 8, 8)
    torch.testing.assert_close(model(x).double(), expected(x, model), atol=1e-6, rtol=1e-6)


def test_the_output_has_plain_strides_whatever_a_one_row_view_has() -> None:
    model = hosted("oracle_accurate", (1, 8))
    x = torch.randn(4, 8).as_strided((1, 1, 8), (7, 99, 1))
    assert x.is_contiguous() and x.stride() == (7, 99, 1)
    assert model(x).stride() == (8, 8, 1)


def test_a_call_of_known_facts_is_one_look_up() -> None:
    space = host_namespace(FILES["oracle_accurate"][0].read_text("utf-8"), SMALL_LIMITS)
    model = space["ModelNew"](64)
    asked = []
    checked = space["require_supported"]
    space["require_supported"] = lambda *given: (asked.append(given), checked(*given))
    for _ in range(3):
        model(torch.randn(3, 64))
    assert len(asked) == 1
    assert space["planned"].cache_info().hits == 2


# ---- the traced files: what a trace was made for, and what it must not be used for ----


@pytest.fixture
def fuser() -> Any:
    """TorchScript's fuser on the CPU, as it works on a GPU (here it interprets what it has fused)."""
    torch._C._jit_set_texpr_fuser_enabled(True)
    before = torch._C._jit_can_fuse_on_cpu(), torch._C._jit_get_te_must_use_llvm_cpu()
    torch._C._jit_override_can_fuse_on_cpu(True)
    torch._C._jit_set_te_must_use_llvm_cpu(False)
    yield
    torch._C._jit_override_can_fuse_on_cpu(before[0])
    torch._C._jit_set_te_must_use_llvm_cpu(before[1])


def last_run_was_fused() -> bool:
    return "TensorExprGroup" in str(torch.jit.last_executed_optimized_graph())


@pytest.mark.parametrize("stem", TRACED[1:])  # the first has nothing to fuse
def test_what_is_handed_out_is_always_fused(stem: str, fuser: Any) -> None:
    model = randomised(space_of(stem)["ModelNew"]((4, 16)))
    plain = torch.randn(3, 4, 16)
    for x in (plain, COPIED["transposed"](plain), torch.randn(1, 4, 16).expand(3, 4, 16), plain):
        y = model(x)
        assert last_run_was_fused(), f"strides {x.stride()}"
        torch.testing.assert_close(y.double(), expected(x, model), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("stem", TRACED)
def test_a_parameter_transposed_in_its_storage_is_another_parameter(stem: str, name: str) -> None:
    model = randomised(space_of(stem)["ModelNew"]((8, 8)))
    x = torch.randn(3, 8, 8)
    model(x)
    setattr(model.ln, name, torch.nn.Parameter(getattr(model.ln, name).detach().t()))
    torch.testing.assert_close(model(x).double(), expected(x, model), atol=1e-5, rtol=1e-5)
