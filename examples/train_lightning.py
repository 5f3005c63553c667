"""Lightning: the strategy names the backend.

    python examples/train_lightning.py                                          # two ranks on this machine
    torchrun --nnodes 2 --nproc-per-node 2 ... examples/train_lightning.py --nodes 2 --devices 2
"""

import argparse
import tempfile

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.mse_loss(self.body(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        if self.global_rank == 0:
            print(f"epoch {self.current_epoch}: loss {self.trainer.callback_metrics['loss'].item():.4f}", flush=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="hybridps")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=2, help="ranks per machine")
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()

    x = torch.randn(1024, 32, generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True) / 8), batch_size=32)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=arguments.devices,
            num_nodes=arguments.nodes,
            strategy=DDPStrategy(process_group_backend=arguments.backend),
            max_epochs=arguments.epochs,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Regression(), data)


if __name__ == "__main__":
    main()
