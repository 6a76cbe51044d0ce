"""Prints ppo_atari_multigpu.py with changes, for runs that show what a deviation from CleanRL does.

python results/ablation.py ordinary-shuffle > ordinary_shuffle.py
torchrun --standalone --nnodes=1 --nproc_per_node=2 ordinary_shuffle.py --env-id PongNoFrameskip-v4

ordinary-shuffle    minibatches are parts of a shuffle of all that a process has collected, not of each environment's
local-advantages    each process normalizes advantages by the moments of its own part of the minibatch, not the job's
rounded-fp32        --precision bf16 rounds where bf16 would and computes in fp32: its numbers, up to the order of sums,
                    at almost the speed of fp32 on a processor without bf16 units, where real bf16 takes twice as long
small-game          for the game of the learning test: PYTHONPATH=tests python SCRIPT --env-id Catch-v0
"""

import argparse
from pathlib import Path

ROUNDED = """class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.bfloat16().float()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.bfloat16().float()


def encode_rounded(network, x):
    for layer in network:
        tensors = {name: Rounded.apply(tensor) for name, tensor in layer.named_parameters()}
        x = torch.func.functional_call(layer, tensors, x)
        if tensors:
            x = Rounded.apply(x)
    return x


"""

CHANGES = {  # pairs: as it is, as it is to be; the first two need equal shares of the environments
    "ordinary-shuffle": (
        (
            "order = torch.rand((total_num_envs, num_steps), generator=generator)[mine].argsort(1)",
            "order = torch.rand((world_size, num_steps * num_envs), generator=generator)[rank].argsort()",
        ),
        ("rows = order * num_envs + torch.arange(num_envs)[:, None]", "rows = order"),
        (
            "rows.view(num_envs, args.num_minibatches, -1).transpose(0, 1).flatten(1)",
            "rows.view(args.num_minibatches, -1)",
        ),
    ),
    "local-advantages": (
        ("            dist.all_reduce(moments, group=group)", "            minibatch_part = b_inds.shape[1]"),
        ("adv_mean = moments[0] / minibatch_size", "adv_mean = moments[0] / minibatch_part"),
        ("adv_mean) / (minibatch_size - 1)", "adv_mean) / (minibatch_part - 1)"),
    ),
    "rounded-fp32": (
        ("class Agent(nn.Module):", ROUNDED + "class Agent(nn.Module):"),
        (".to(self.dtype, copy=True).div_(255.0)", ".float().div_(255.0).to(self.dtype).float()"),
        (
            "with torch.autocast(x.device.type, self.dtype, enabled=self.dtype != torch.float32):",
            "if self.dtype == torch.bfloat16:",
        ),
        (
            "            return self.network(x).float()  # (N, 512)",
            "            return encode_rounded(self.network, x)\n        return self.network(x)",
        ),
    ),
    "small-game": (  # what a user changes for a game that is not ale-py's
        ("from cleanrl_utils import process", "import catch  # registers Catch-v0\nfrom cleanrl_utils import process"),
        ("    check_game(args)\n", ""),
        ("noop_max=30", "noop_max=0"),  # its games are short
    ),
}


def changed(names: list[str]) -> str:
    """The script's text with these changes."""
    source = (Path(__file__).parents[1] / "ppo_atari_multigpu.py").read_text()
    for before, after in (change for name in names for change in CHANGES[name]):
        assert source.count(before) == 1, f"the script has changed: no single {before!r}"
        source = source.replace(before, after)
    return source


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("changes", nargs="+", choices=CHANGES, metavar="change")
    print(changed(parser.parse_args().changes), end="")
