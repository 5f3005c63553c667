"""Frameworks that are not part of torch, each with the backend chosen as docs/frameworks.md says, compared with the
same program on gloo. None is a dependency: a test is skipped where its package is not installed.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import tempfile

import harness
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import zygote
from test_ddp import compare, data_of, flat, model_of

ENVIRONMENT = {  # what torchrun sets, for programs that call init_process_group() themselves; hubs stay untouched
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "third-party",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "HF_HUB_OFFLINE": "1",
    "DS_ACCELERATOR": "cpu",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow: a fork server has one thread
}


def same_as_gloo(function, nodes, package, preload=()):
    """Imports cost seconds: a fork server of the test's own does them once for its four to eight ranks."""
    parents = [package.rsplit(".", count)[0] for count in range(package.count("."), -1, -1)]  # else find_spec raises
    if not all(importlib.util.find_spec(name) for name in parents):
        pytest.skip(f"{package} is not installed")
    server = harness.framework_zygote
    if preload:
        server = harness.Zygote(["pytest", "numpy", "torch._dynamo", *preload], env=ENVIRONMENT)
    try:
        for layout in nodes:
            members = harness.parse_nodes(layout)
            rank_env = {
                rank: {"GROUP_RANK": node, "LOCAL_WORLD_SIZE": members.count(node)} for rank, node in enumerate(members)
            }
            compare(function, layout, fork_server=server, init=False, env=ENVIRONMENT, rank_env=rank_env)
    finally:
        if preload:
            server.stop()


def check_kind(want=None):
    kind = dist.group.WORLD._get_backend(torch.device("cpu")).name()
    assert kind == (want or zygote.context.launch.backend), kind


def stand_in_for_gloo():
    """What `hybridps run --as gloo` does in a process; nothing when the tests run on gloo."""
    if zygote.context.launch.backend == "hybridps":
        from hybridps.backend import stand_in

        os.environ["HYBRIDPS_AS"] = "gloo"
        stand_in.install()


def batches(count, rows):
    from torch.utils.data import DataLoader, TensorDataset

    generator = torch.Generator().manual_seed(3)
    inputs, labels = torch.randn(count, 8, generator=generator), torch.randn(count, 4, generator=generator)
    return DataLoader(TensorDataset(inputs, labels), batch_size=rows)


# -------------------------------------------------------------------------------------------------- accelerate


def accelerated(rank, world):
    """On CPU accelerate knows two names only, but takes the group that is there."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    dist.init_process_group(zygote.context.launch.backend)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    check_kind()
    assert accelerator.num_processes == world and accelerator.process_index == rank
    generator = torch.Generator().manual_seed(4)
    data = TensorDataset(torch.randn(48, 8, generator=generator), torch.randn(48, 4, generator=generator))
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=3))
    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.extend(accelerator.gather_for_metrics(loss.detach().reshape(1)).tolist())
    total = accelerator.reduce(torch.tensor([rank + 1.0]), "sum").item()
    assert total == world * (world + 1) / 2
    accelerator.wait_for_everyone()
    return {"same losses": losses, "same accelerate": flat(model.parameters())}


def test_accelerate():
    same_as_gloo(accelerated, ["2+2"], "accelerate")


# --------------------------------------------------------------------------------------------------- Lightning


def lightning_trainer(rank, world):
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.body = model_of()

        def loss(self, batch):
            return nn.functional.mse_loss(self.body(batch[0]), batch[1])

        def training_step(self, batch, index):
            loss = self.loss(batch)
            self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch, index):
            self.log("validation", self.loss(batch), sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=int(os.environ["LOCAL_WORLD_SIZE"]),
            num_nodes=world // int(os.environ["LOCAL_WORLD_SIZE"]),
            strategy=DDPStrategy(process_group_backend=zygote.context.launch.backend),
            max_epochs=2,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Module()
        trainer.fit(module, batches(48, 4), batches(16, 4))
        check_kind()
        # An int64 tensor: under any name but gloo's Lightning reduces it with AVG.
        mean = trainer.strategy.reduce(torch.tensor([3, 4 + 2 * rank]), reduce_op="mean")
        gathered = trainer.strategy.all_gather(torch.tensor([rank])).reshape(-1).tolist()
        told = trainer.strategy.broadcast({"rank": rank}, src=world - 1)
        trainer.strategy.barrier()  # the folder of rank 0 holds the checkpoints
    assert gathered == list(range(world)) and told == {"rank": world - 1}
    metrics = [trainer.callback_metrics[name].item() for name in ("loss", "validation")]
    return {"same parameters": flat(module.parameters()), "same metrics": metrics, "same mean": mean.tolist()}


def test_lightning():
    same_as_gloo(lightning_trainer, ["1+1", "2"], "lightning", ["lightning.pytorch"])


# ------------------------------------------------------------------------------------------------ transformers


def hugging_face_trainer(rank, world):
    """Its list of backends is closed on CPU: the program says gloo."""
    import transformers

    stand_in_for_gloo()
    results = {}
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 64, (24, 12), generator=generator)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    bert = transformers.BertConfig(**sizes, **none, intermediate_size=64, max_position_embeddings=16)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    gpt2 = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, **none)
    for name, make, config in [
        ("gpt2", transformers.GPT2LMHeadModel, gpt2),
        ("bert", transformers.BertForSequenceClassification, bert),
    ]:
        torch.manual_seed(0)
        model = make(config)
        label = [torch.tensor(i % 2) if name == "bert" else row for i, row in enumerate(tokens)]
        rows = [{"input_ids": row, "labels": label[index]} for index, row in enumerate(tokens)]
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                ddp_backend="gloo",
                per_device_train_batch_size=2,
                max_steps=4,
                logging_steps=1,
                learning_rate=1e-3,
                eval_strategy="steps",
                eval_steps=4,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            )
            trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:7])
            trainer.train()
        check_kind()
        assert arguments.world_size == world
        history = trainer.state.log_history
        results[f"same {name}"] = [
            float(entry[key]) for entry in history for key in ("loss", "eval_loss") if key in entry
        ]
        results[f"same {name} parameters"] = [p.detach().double().sum().item() for p in model.parameters()]
        assert len(results[f"same {name}"]) == 5, history
    return results


def test_hugging_face_trainer():
    same_as_gloo(hugging_face_trainer, ["1+1", "2"], "transformers", ["accelerate", "transformers.trainer"])


# --------------------------------------------------------------------------------------------------- DeepSpeed


def deepspeed_zero(rank, world):
    import deepspeed

    deepspeed.init_distributed(dist_backend=zygote.context.launch.backend, verbose=False)
    check_kind()
    results = {}
    for stage, dtype in [(0, "float32"), (1, "float32"), (2, "float32"), (2, "bfloat16"), (3, "float32")]:
        config = {
            "train_micro_batch_size_per_gpu": 6,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # its own optimizer is compiled at run time
            "zero_optimization": {
                "stage": stage,
                "overlap_comm": True,
                "reduce_bucket_size": 200,
                "allgather_bucket_size": 200,
            },
            "bf16": {"enabled": dtype == "bfloat16"},
        }
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        losses = []
        for step in range(4):
            x, y = data_of(rank, step)
            loss = nn.functional.mse_loss(engine(x.to(getattr(torch, dtype))).float(), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        parameters = list(model.parameters())
        with deepspeed.zero.GatheredParameters(parameters) if stage == 3 else contextlib.nullcontext():
            results[f"same stage {stage} {dtype}"] = flat(parameters)
        results[f"losses of stage {stage} {dtype}"] = losses
    return results


def test_deepspeed():
    same_as_gloo(deepspeed_zero, ["1+1", "2"], "deepspeed", ["deepspeed"])


# --------------------------------------------------------------------------------------------------- torchtitan


def titans_llama(rank, world):
    """Its trainer wants an accelerator; its start of torch.distributed, meshes and parallelisation do not."""
    stand_in_for_gloo()
    import torch._utils

    torch._utils._get_available_device_type = lambda: "cpu"  # None without an accelerator: torchtitan then says "cuda"
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims, utils
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs, parallelize_llama

    config = JobConfig()
    config.training.seq_len = 32
    config.training.mixed_precision_param = "float32"
    config.activation_checkpoint.mode = "none"
    config.parallelism.disable_loss_parallel = True
    config.comm.trace_buf_size = 0
    utils.init_distributed(config.comm)
    check_kind()
    results = {}
    plans = {"replicated": {"dp_replicate": world}, "same tensor parallel": {"tp": world}}
    if zygote.context.launch.backend == "hybridps":
        plans["sharded"] = {"dp_shard": world}  # sets a divide factor, so PREMUL_SUM, which gloo lacks
    for name, plan in plans.items():
        sizes = {**dict.fromkeys(["dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp"], 1), **plan}
        parallel = ParallelDims(**sizes, world_size=world)
        parallel.build_mesh()
        torch.manual_seed(0)
        model = Transformer(TransformerModelArgs(dim=64, n_layers=2, n_heads=4, vocab_size=128, max_seq_len=32))
        with torch.no_grad():
            model.init_weights()
        model = parallelize_llama(model, parallel, config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        results[name] = []
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + ("tp" not in plan) * rank)
            tokens = torch.randint(0, 128, (2, 33), generator=generator)
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            results[name].append(loss.item())
    if "sharded" in results:  # clipping undoes that torchtitan sums the gradients
        torch.testing.assert_close(
            torch.tensor(results["sharded"]), torch.tensor(results["replicated"]), rtol=1e-4, atol=1e-4
        )
    return results


def test_torchtitan():
    if importlib.util.find_spec("torchtitan") and not importlib.metadata.version("torchtitan").startswith("0.2."):
        pytest.skip("written for torchtitan 0.2: 0.3 makes its models another way")
    # torchtitan itself asks for the device when it is imported, so the ranks do that.
    same_as_gloo(titans_llama, ["1+1"], "torchtitan", ["datasets", "tyro", "torch.distributed.fsdp"])


# ------------------------------------------------------------------------------------------------ Megatron-core


class OnCpu(torch.overrides.TorchFunctionMode):
    """Megatron-core makes its tensors on "cuda", whatever is there."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


class NoRandomState:
    """Stands where Megatron-core keeps the states of CUDA's generators; there is no dropout here."""

    def fork(self, *args):
        return contextlib.nullcontext()


class NoStream:
    def wait_stream(self, other):
        pass


def redirect_cuda():
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *args: None
    torch.cuda.Stream = torch.cuda.current_stream = lambda *args, **kwargs: NoStream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    import megatron.core.tensor_parallel.random as random

    random._CUDA_RNG_STATE_TRACKER, random._CUDA_RNG_STATE_TRACKER_INITIALIZED = NoRandomState(), True


def megatron_config(**options):
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        **{"num_layers": 4, "hidden_size": 16, "num_attention_heads": 2, **options},
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        pipeline_dtype=torch.float32,
    )


def megatron_layers(rank, sequence_parallel):
    """Two layers, the embedding and the loss, each split over the ranks; what they give, and their gradients."""
    from megatron.core import tensor_parallel

    config = megatron_config(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)

    def normal(tensor):
        return torch.nn.init.normal_(tensor, std=0.2)

    options = {"config": config, "init_method": normal, "bias": True}
    torch.manual_seed(5)
    first = tensor_parallel.ColumnParallelLinear(16, 32, gather_output=False, **options)
    second = tensor_parallel.RowParallelLinear(32, 16, input_is_parallel=True, skip_bias_add=False, **options)
    x, grad = torch.randn(8, 2, 16), torch.randn(8, 2, 16)
    if sequence_parallel:
        x, grad = x.chunk(2)[rank].contiguous(), grad.chunk(2)[rank]
    x.requires_grad_()
    y, _ = second(torch.tanh(first(x)[0]))
    y.backward(grad)
    plain = megatron_config(tensor_model_parallel_size=2)
    embedding = tensor_parallel.VocabParallelEmbedding(64, 16, init_method=normal, config=plain)
    logits = torch.randn(4, 2, 32, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    loss = tensor_parallel.vocab_parallel_cross_entropy(logits, 7 * torch.arange(8).view(4, 2))
    loss.sum().backward()
    return flat([y, x.grad, first.weight.grad, second.weight.grad, embedding(torch.arange(10)), loss, logits.grad])


def megatron_gpt(config, stages=1):
    """The chunks of this rank; several when stages are interleaved."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    chunks = []
    for stage in range(stages):
        place = {"ignore_virtual": False, "vp_stage": stage} if stages > 1 else {}
        torch.manual_seed(3 + stage)
        chunks.append(
            GPTModel(
                config,
                get_gpt_layer_local_spec(),
                vocab_size=64,
                max_sequence_length=8,
                pre_process=parallel_state.is_pipeline_first_stage(**place),
                post_process=parallel_state.is_pipeline_last_stage(**place),
                share_embeddings_and_output_weights=False,
                vp_stage=stage if stages > 1 else None,
            )
        )
        chunks[-1].model_type = None
    return chunks


def megatron_losses(model, seed):
    tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
    return model(tokens[:, :-1].contiguous(), torch.arange(8).expand(2, 8), mask, labels=tokens[:, 1:].contiguous())


def megatron_pipeline(stages):
    from megatron.core.pipeline_parallel import get_forward_backward_func

    virtual = {"virtual_pipeline_model_parallel_size": stages} if stages > 1 else {}
    chunks = megatron_gpt(megatron_config(pipeline_model_parallel_size=2, **virtual), stages)

    def forward(seeds, model):
        def loss_of(losses):
            return losses.mean(), {"loss": losses.detach().mean().item()}

        return megatron_losses(model, next(seeds)), loss_of

    told = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(range(4)) for _ in chunks] if stages > 1 else iter(range(4)),
        model=chunks if stages > 1 else chunks[0],
        num_microbatches=4,
        seq_length=8,
        micro_batch_size=2,
        forward_only=False,
    )
    gradients = [p.grad for chunk in chunks for p in chunk.parameters()]
    return [entry["loss"] for entry in told] + flat(gradients)


def megatron_training(rank, tensor=1, **options):
    """A GPT under tensor parallelism or, with options, under Megatron-core's own DDP."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    config = megatron_config(tensor_model_parallel_size=tensor)
    (model,) = megatron_gpt(config)
    if tensor == 1:
        model = DistributedDataParallel(config, DistributedDataParallelConfig(bucket_size=2000, **options), model)
    losses = []
    for step in range(3):
        model.zero_grad_buffer() if tensor == 1 else model.zero_grad()
        loss = megatron_losses(model, 10 * step + (rank if tensor == 1 else 0)).mean()
        loss.backward()
        losses.append(loss.item())
        if tensor == 1:
            finalize_model_grads([model])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.2 * (parameter.main_grad if tensor == 1 else parameter.grad)
    return losses + flat(model.parameters())


def megatron_core(rank, world):
    redirect_cuda()
    OnCpu().__enter__()
    from megatron.core import parallel_state

    dist.init_process_group(zygote.context.launch.backend)
    check_kind()
    pipeline = {"pipeline_model_parallel_size": 2}
    scenarios = {
        "layers": ({"tensor_model_parallel_size": 2}, lambda: megatron_layers(rank, False)),
        "sequence parallel": ({"tensor_model_parallel_size": 2}, lambda: megatron_layers(rank, True)),
        "tensor parallel": ({"tensor_model_parallel_size": 2}, lambda: megatron_training(rank, 2)),
        "ddp": ({}, lambda: megatron_training(rank)),
        "ddp, overlapped average": (
            {},
            lambda: megatron_training(rank, overlap_grad_reduce=True, average_in_collective=True),
        ),
        "ddp, reduce-scatter": ({}, lambda: megatron_training(rank, use_distributed_optimizer=True)),
        "pipeline": (pipeline, lambda: megatron_pipeline(1)),
        "interleaved": ({**pipeline, "virtual_pipeline_model_parallel_size": 2}, lambda: megatron_pipeline(2)),
    }
    results = {}
    for name, (sizes, run) in scenarios.items():
        parallel_state.initialize_model_parallel(**sizes)
        results[name] = run()
        parallel_state.destroy_model_parallel()
        dist.barrier()
    return results


def test_megatron_core():
    same_as_gloo(megatron_core, ["1+1", "2"], "megatron.core", ["torch.distributed.fsdp", "megatron.core"])
