"""Our layer among vLLM's own classes: construction, refusals, weights, caches, dummy batches.

Claims, line by line of the parity list: what is refused and how; the checkpoint's names; packed
weights on every rank equal vLLM's own packing, for both loader generations and named shards; the
caches ask for vLLM's bytes; profiling and dummy batches select nothing and write zeros.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from harness import (
    MAX_REQUESTS,
    Quantised,
    Side,
    StockAttention,
    build,
    checkpoint,
    engine_config,
    finish_loading,
    forward_context,
    load,
    text_config,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.v1.attention.backend import CommonAttentionMetadata

from flash_qsa import dispatch
from flash_qsa.integrations.vllm import owner as our_owner
from flash_qsa.integrations.vllm import selection
from flash_qsa.integrations.vllm.backend import QSABackend, QSAImpl
from flash_qsa.integrations.vllm.caches import SideCacheBackend
from flash_qsa.integrations.vllm.owner import QSAAttention
from flash_qsa.integrations.vllm.profiling import LayerSizes, largest_steps
from flash_qsa.ops.prepare.api import Prepared
from flash_qsa.targets import TARGETS, pretend
from flash_qsa.testing.inputs import Shape

SHAPE = Shape(
    heads=4, kv_heads=2, head_dim=128, index_heads=2, index_dim=128, page_size=48,
    ring_capacity=4,
)  # fmt: skip

SHAPE_WITH_DRAFTS = dataclasses.replace(SHAPE, ring_capacity=8)


@pytest.fixture
def layer():
    return build(QSAAttention, engine_config(text_config()))


@pytest.mark.parity("P01")
@pytest.mark.parametrize("kind", [StockAttention, QSAAttention], ids=["vllm", "ours"])
def test_a_cache_and_a_16_bit_model_are_needed(kind):
    with pytest.raises(ValueError):
        build(kind, engine_config(text_config(), cache_config=None))
    with pytest.raises(NotImplementedError):
        build(kind, engine_config(text_config(), dtype=torch.float32))


def test_fp16_goes_beyond_vllms_layer():
    config = engine_config(text_config(), dtype=torch.float16)
    with pytest.raises(NotImplementedError):
        build(StockAttention, config)
    layer = build(QSAAttention, engine_config(text_config(), dtype=torch.float16))
    assert layer.qkv_proj.weight.dtype == layer.kv_cache_torch_dtype == torch.float16
    assert layer.indexer.index_dtype == layer.indexer.raw_key_cache.dtype == torch.float16


@pytest.mark.parity("P02", "P25", "P26", "P33")
def test_geometry_comes_from_the_config():
    config = text_config(indexer_n_heads=3, indexer_budget=40, indexer_compress_ratio=8)
    layer = build(QSAAttention, engine_config(config))
    index = layer.indexer
    assert layer.index_qk_size == 4 * 128 and index.config.top_k == 5
    assert (index.output_width, index.packed_output_width) == (47, 48)
    assert layer.scaling == 128**-0.5 and layer.head_dim == 128
    assert layer.topk_indices_buffer.shape == (128, selection.row_width(5))
    assert layer.topk_indices_buffer.dtype == torch.int32
    assert "topk_indices_buffer" not in layer.state_dict()
    assert layer.qkv_proj.bias is None and layer.o_proj.bias is None
    assert layer.q_size == 4 * 128 and layer.qkv_proj.output_sizes[0] == 2 * layer.q_size


def parallel(prefill: int, decode: int) -> SimpleNamespace:
    return SimpleNamespace(
        prefill_context_parallel_size=prefill, decode_context_parallel_size=decode
    )


@pytest.mark.parity("P23", "P05")
@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("kv_cache_dtype.*fp8_e5m2", {"kv": "fp8_e5m2"}),
        ("indexer_kv_dtype.*int8", {"index": "int8"}),
        ("decode_context_parallel_size.*2", {"parallel_config": parallel(1, 2)}),
        ("prefill_context_parallel_size.*2", {"parallel_config": parallel(2, 1)}),
        ("is_causal.*False", {"text": {"is_causal": False}}),
        ("dual_chunk.*8192", {"text": {"dual_chunk_attention_config": {"chunk_size": 8192}}}),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_both_layers_refuse_the_same_and_ours_says_what(named, changes):
    changes = dict(changes)
    config = text_config(**changes.pop("text", {}))
    with pytest.raises(NotImplementedError):
        build(StockAttention, engine_config(config, **changes))
    with pytest.raises(NotImplementedError, match=named):
        build(QSAAttention, engine_config(config, **changes))


@pytest.mark.parity("P23")
def test_quantised_kv_checkpoints_are_refused():
    quant = Quantised("fp8", kv_cache_scheme={"num_bits": 8})
    for kind in (StockAttention, QSAAttention):
        with pytest.raises(NotImplementedError):
            build(kind, engine_config(text_config()), quant_config=quant)


@pytest.mark.parity("P28")
def test_the_main_cache_dtype_follows_the_layer_and_scales_are_buffers():
    config = engine_config(text_config(), kv="fp8")
    config.cache_config.kv_cache_dtype_skip_layers = ["1"]
    skipped, kept = build(QSAAttention, config), build(QSAAttention, config, layer_id=3)
    assert skipped.kv_cache_torch_dtype == torch.bfloat16
    assert kept.kv_cache_torch_dtype == torch.uint8
    buffers = dict(kept.named_buffers())
    assert float(buffers["_k_scale"]) == float(buffers["_v_scale"]) == 1.0
    assert skipped.impl.scales(skipped) == (None, None)
    assert kept.impl.scales(kept)[0] is kept._k_scale


@pytest.mark.parity("P34")
def test_a_name_is_registered_once():
    config = engine_config(text_config())
    layer = build(QSAAttention, config)
    known = config.compilation_config.static_forward_context
    assert known[layer.layer_name] is layer and len(known) == 3
    with pytest.raises(ValueError, match="already registered"):
        build(QSAAttention, config)


@pytest.mark.parity("P35", "P06", "P07")
@pytest.mark.parametrize("drafts", [0, 1, 5])
@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_caches_ask_for_vllms_bytes(drafts, kv):
    specs = []
    for kind in (StockAttention, QSAAttention):
        config = engine_config(text_config(), kv=kv, index="fp8", drafts=drafts, block_size=240)
        build(kind, config)
        known = config.compilation_config.static_forward_context
        specs.append({name: layer.get_kv_cache_spec(config) for name, layer in known.items()})
    assert specs[0] == specs[1]
    for name in specs[0]:
        assert specs[0][name].page_size_bytes == specs[1][name].page_size_bytes


@pytest.mark.parity("P07")
def test_pages_that_cut_a_group_are_refused():
    with pytest.raises(ValueError, match="50.*4"):
        build(QSAAttention, engine_config(text_config(), block_size=50))


def test_page_sizes_are_read_when_the_specs_are():
    """Hybrid models raise the block size after their layers are built."""
    config = engine_config(text_config(), block_size=48)
    layer = build(QSAAttention, config)
    config.cache_config.block_size = 160
    keys = layer.indexer.compressed_key_cache.get_kv_cache_spec(config)
    assert keys.block_size == layer.get_kv_cache_spec(config).block_size == 160


@pytest.mark.parity("P40")
def test_backend_facts_are_vllms(layer):
    stock = build(StockAttention, engine_config(text_config())).attn_backend
    assert layer.get_attn_backend() is QSABackend and QSABackend.get_impl_cls() is QSAImpl
    assert QSABackend.get_name() == "FLASH_QSA"
    for fact in ("is_sparse", "supports_kv_connector", "get_supported_kernel_block_sizes"):
        assert getattr(QSABackend, fact)() == getattr(stock, fact)(), fact
    assert QSABackend.supported_kv_cache_dtypes == stock.supported_kv_cache_dtypes
    assert set(stock.supported_dtypes) < set(QSABackend.supported_dtypes)
    assert QSABackend.forward_includes_kv_cache_update is False
    builder = QSABackend.get_builder_cls()
    assert builder._cudagraph_support == stock.get_builder_cls()._cudagraph_support
    side = build(StockAttention, engine_config(text_config())).indexer.raw_key_cache
    theirs = side.get_attn_backend().supported_kv_cache_layouts()
    assert SideCacheBackend.supported_kv_cache_layouts() == theirs


@pytest.mark.parity("P41", "P43")
def test_the_implementation_refuses_what_it_cannot_do(layer):
    query = torch.zeros(2, 4, 128, dtype=torch.bfloat16)
    prepared, plan = Prepared(query, query, query[:, :2]), SimpleNamespace(num_rows=2)
    call = (prepared, layer.kv_cache, plan, layer.options, torch.empty_like(query))
    with pytest.raises(RuntimeError, match="topk_indices_buffer"):
        layer.impl.forward_qsa(SimpleNamespace(), *call)
    with pytest.raises(NotImplementedError, match="output_scale"):
        layer.impl.forward_qsa(layer, *call, output_scale=torch.ones(1))
    with pytest.raises(NotImplementedError, match="query.*float32"):
        layer.impl.forward_qsa(layer, Prepared(query.float(), query, query), *call[1:])
    for name, value in (("alibi_slopes", [1.0]), ("sliding_window", 4), ("sinks", query)):
        with pytest.raises(NotImplementedError, match=name):
            QSAImpl(4, 128, 1.0, 2, **{name: value})
    with pytest.raises(NotImplementedError, match="kv_sharing.*layer 3"):
        QSAImpl(4, 128, 1.0, 2, kv_sharing_target_layer_name="layer 3")
    empty = SimpleNamespace(num_rows=0)
    output = torch.full((3, 4, 128), torch.nan)
    layer.impl.forward_qsa(layer, prepared, layer.kv_cache, empty, layer.options, output)
    assert (output == 0).all()


@pytest.mark.parity("P40")
def test_the_implementation_refuses_decode_context_parallelism(monkeypatch):
    monkeypatch.setattr(
        "vllm.distributed.parallel_state.get_dcp_world_size_and_rank", lambda *enabled: (2, 0)
    )
    with pytest.raises(NotImplementedError, match="decode_context_parallel_size.*2"):
        QSAImpl(4, 128, 1.0, 2)


@pytest.mark.parity("P31", "P41")
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_fp8_storage_has_its_type_where_the_device_has_it(target):
    with FakeTensorMode():
        stored = torch.empty(2, 2, 48, 256, dtype=torch.uint8, device="cuda")
    for name in ("fp8", "fp8_e4m3"):
        impl = QSAImpl(4, 128, 1.0, 2, kv_cache_dtype=name)
        with pretend(target):
            seen = impl.typed_cache(stored)
        typed = target.backend == "hip" or target.capability >= (8, 9)
        assert seen.dtype == (torch.float8_e4m3fn if typed else torch.uint8)
        assert seen.shape == stored.shape


@pytest.mark.parity("P36")
def test_profiling_allocates_a_steps_tensors_and_the_kernels_scratch(layer, monkeypatch):
    taken = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function is torch.ops.aten.empty.memory_format:
                taken.append(result.nbytes)
            return result

    output = torch.empty(100, 4, 128, dtype=torch.bfloat16)
    some = torch.zeros(100, 8, dtype=torch.bfloat16)
    kept = 2 * output.nbytes + 100 * 2 * 128 * 2  # query, gate; index queries
    with forward_context(None), Watch():
        layer._run_qsa(some, some, torch.zeros(3, 100), output)
        monkeypatch.setattr(layer, "_scratch_bytes", lambda rows, device: 12_345 * rows)
        layer._run_qsa(some, some, torch.zeros(3, 100), output)
    assert taken == [kept, kept + 1_234_500]  # the first on a CPU, where kernels take none


@pytest.mark.parity("P36")
def test_scratch_is_asked_for_with_the_engines_limits(monkeypatch):
    config = engine_config(text_config(), kv="fp8", index="fp8", drafts=3)
    layer = build(QSAAttention, config)
    config.cache_config.block_size = 160  # as hybrid models raise it afterwards
    monkeypatch.setattr(dispatch, "choose", lambda backend, device: dispatch.Choice("triton", ""))
    monkeypatch.setattr(our_owner, "scratch_bytes", lambda *given: given)
    with pretend("sm_90"):
        sizes, options, shapes, target = layer._scratch_bytes(100, torch.device("cuda"))
    assert options is layer.options and target.name == "sm_90"
    bf16, e4m3 = torch.bfloat16, torch.float8_e4m3fn
    assert sizes == LayerSizes(4, 2, 128, 2, 128, 160, 8, bf16, torch.uint8, e4m3)
    assert shapes == largest_steps(100, MAX_REQUESTS, 4, 512)
    assert layer._scratch_bytes(100, torch.device("cpu")) == 0


@pytest.mark.parity("P09", "P36")
def test_without_a_step_nothing_is_selected_and_zeros_come_out(layer):
    load(layer, checkpoint(text_config()))
    finish_loading(layer)
    layer.topk_indices_buffer.fill_(77)
    output = torch.full((5, 4, 128), torch.nan, dtype=torch.bfloat16)
    some = torch.zeros(5, 8, dtype=torch.bfloat16)
    with forward_context(None):
        layer._run_qsa(some, some, torch.zeros(3, 5), output)
    assert (output == 0).all()
    rows = layer.topk_indices_buffer
    assert (rows[:5, :-1] == -1).all() and (rows[:5, -1] == 0).all() and (rows[5:] == 77).all()
    layer.indexer.skip_topk = True
    rows.fill_(77)
    with forward_context(None):
        layer._run_qsa(some, some, torch.zeros(3, 5), output)
    assert (rows == 77).all()


@pytest.mark.parity("P17", "P18")
def test_reuse_needs_a_draft_layer_and_a_buffer():
    config = text_config()
    target = build(QSAAttention, engine_config(config)).indexer
    draft = build(QSAAttention, engine_config(config), layer_id=config.num_hidden_layers).indexer
    assert draft.reusable and not target.reusable
    rows = torch.zeros(4, draft.row_width, dtype=torch.int32)
    plan = SimpleNamespace(num_rows=4)
    for indexer in (target, draft):
        indexer.skip_topk = True
        with pytest.raises(RuntimeError, match="skip_topk"):
            indexer.select(None, None, plan, None)
    with pytest.raises(RuntimeError, match="no draft layer"):
        target.select(None, None, plan, rows)
    assert draft.select(None, None, plan, rows) is rows
    draft.skip_topk = False
    query = torch.zeros(4, 2, 128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="selection rows"):
        draft.select(query, None, plan, rows[:, :-1])


@pytest.mark.parity("P37")
def test_an_unbound_main_cache_is_an_error():
    side = Side(QSAAttention, engine_config(text_config()), SHAPE, 1, 48)
    metadata = side.metadata([0], [4], [4])
    side.layer.kv_cache = torch.tensor([])
    some = torch.zeros(4, 8, dtype=torch.bfloat16)
    with forward_context(metadata), pytest.raises(RuntimeError, match="not bound"):
        side.layer._run_qsa(some, some, torch.zeros(3, 4), some)


@pytest.mark.parity("P12", "P30", "P49")
@pytest.mark.parametrize(
    "changes",
    [
        {"indexer_head_dim": 96},
        {"indexer_compress_ratio": 6, "indexer_budget": 24},
        {"head_dim": 96, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ],
    ids=["index dim 96", "ratio 6", "no mrope, all dims rotate"],
)
def test_geometries_that_vllm_cannot_fuse_run_and_both_paths_agree(changes):
    if "head_dim" in changes:
        changes = {**changes, "indexer_head_dim": 96}
    config = text_config(**changes)
    shape = Shape(
        heads=4, kv_heads=2, head_dim=config.head_dim, index_heads=2,
        index_dim=config.indexer_head_dim, page_size=48, ratio=config.indexer_compress_ratio,
        top_k=config.indexer_budget // config.indexer_compress_ratio,
        ring_capacity=config.indexer_compress_ratio,
    )  # fmt: skip
    outputs = []
    for fused in (True, False):
        additional = {"flash_qsa": {"fused_prepare": fused}}
        side = Side(QSAAttention, engine_config(config, additional=additional), shape, 1, 48)
        load(side.layer, checkpoint(config))
        finish_loading(side.layer)
        hidden = torch.randn(37, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
        positions = torch.arange(37)
        outputs.append(side.forward(side.metadata([0], [37], [37]), positions, hidden))
    assert torch.equal(*outputs) and outputs[0].isfinite().all()


def test_registration_builds_our_layer_unless_an_engine_says_otherwise(caplog):
    import vllm.models.qwen4_exp.nvidia.model as stock_model
    from vllm import ModelRegistry

    from flash_qsa.integrations.vllm import models, plugin

    plugin.register()
    for name in plugin.ARCHITECTURES:
        entry = ModelRegistry.models[name]
        assert (entry.module_name, entry.class_name) == (plugin.MODELS_MODULE, name)
        assert entry.load_model_cls() is getattr(models, name)
    assert stock_model.Qwen4ExpQSAAttention is models.build_attention

    def build_with(additional):
        config = engine_config(text_config(), additional=additional)
        return build(models.build_attention, config)

    assert type(build_with({})) is QSAAttention
    assert type(build_with({"flash_qsa": False})) is StockAttention
    with pytest.raises(ValueError, match="flash_qsa.backnd"):
        build_with({"flash_qsa": {"backnd": "triton"}})


def test_our_warm_up_takes_the_place_of_vllms(monkeypatch):
    import vllm.model_executor.warmup.qwen4_exp_qsa_warmup as stock_warmup

    from flash_qsa.integrations.vllm import warmup

    warmup.install_warmup()
    warmup.install_warmup()
    assert stock_warmup.qwen4_exp_qsa_triton_warmup is warmup.warm_up
    config = engine_config(text_config(), drafts=3, block_size=48)
    side = Side(QSAAttention, config, SHAPE_WITH_DRAFTS, 2, 96)
    before = side.memory.pool.clone()
    model = torch.nn.ModuleList([side.layer])
    worker = SimpleNamespace(get_model=lambda: model, vllm_config=config)
    with torch.inference_mode():
        names = warmup.warm_up(worker)
    assert any(name.startswith("decode") for name in names)
    assert any(name.startswith("prefill") for name in names)
    assert torch.equal(side.memory.pool, before) and side.memory.ring.isnan().all()
    worker.get_model = lambda: torch.nn.ModuleList()
    assert warmup.warm_up(worker) == []


@pytest.mark.parity("P38", "P40")
def test_a_capture_is_bounded_by_the_model_and_not_by_its_own_requests():
    side = Side(QSAAttention, engine_config(text_config()), SHAPE, 2, 48)
    for name, ring in ((side.ring_name, True), (side.key_name, False)):
        fields = side.memory.common([0, 1], [1, 1], [9, 17], ring=ring)
        common = CommonAttentionMetadata(**vars(fields))
        assert side.builders[name].build(0, common).max_seq_len == 17
        captured = side.builders[name].build_for_cudagraph_capture(common)
        assert captured.max_seq_len == side.config.model_config.max_model_len == 512
