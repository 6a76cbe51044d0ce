"""Proximal Policy Optimization (Schulman et al. 2017, https://arxiv.org/abs/1707.06347) for Atari.

    python ppo_atari.py --env-id BreakoutNoFrameskip-v4

`ppo_atari_multigpu.py` is this file plus lines marked [ddp], which make it run on many processes.

The style, flags, defaults and metric names are those of CleanRL (https://github.com/vwxyzjn/cleanrl, MIT).
Deliberate deviations:

- Same-step autoreset. Gymnasium's default inserts a step whose action is ignored; it would be trained on.
- A time limit is not a death: the reward of a truncated step gets gamma * V(final observation).
- Environment seeds come from SeedSequence((seed, environment)): with `seed + i`, neighbouring seeds share games.
- Actions and shuffles come from one CPU generator: Gumbel noise for all steps, so that a run is the same on any
  device and, in the multi-GPU script, on any number of processes.
- Minibatches are stratified: each holds the same number of steps of every environment, so any split of the
  environments over processes cuts the same minibatches.
- Losses are sums divided by the minibatch size, gradients views of one buffer: both can be summed over processes.
- Observations stay uint8, channels last in memory, until the network divides them by 255: a quarter of the memory,
  and the layout in which convolutions are fastest.
- Logged losses are means over the iteration; CleanRL logs its last minibatch. `--target-kl` compares this mean.
- episodic_return and episodic_length are of whole games, with raw rewards; the length is in agent steps.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
import tyro
from torch.utils.checkpoint import checkpoint

from cleanrl_utils import process, seeding
from cleanrl_utils.atari import AtariGame, VideoRecorder, check_game, finished_games, game_states, make_vector
from cleanrl_utils.checkpoint import load_checkpoint, load_weights, make_run_folder, restore_random, save_checkpoint
from cleanrl_utils.config import Fault, Fraction, NonNegative, Positive, RunArgs
from cleanrl_utils.logger import Stopwatch, check_wandb_login, open_logger

# === Config ===========================================================================================================
steps_or_batch = tyro.conf.create_mutex_group(required=False)


@dataclass(frozen=True)
class Args(RunArgs):
    env_id: str = "BreakoutNoFrameskip-v4"
    """the game; ALE/*-v5 ids work too, with their own sticky actions"""
    total_timesteps: Positive[int] = 10_000_000
    """environment steps of the whole run, a step being one action of one environment (4 emulator frames)"""
    num_envs: Annotated[Positive[int], tyro.conf.arg(aliases=["--local-num-envs"])] = 8
    """environments that each process steps"""
    num_steps: Annotated[Positive[int], steps_or_batch] = 128
    """steps of each environment per iteration"""
    batch_size: Annotated[Positive[int] | None, steps_or_batch] = None
    """instead of --num-steps: transitions that each process collects per iteration"""
    learning_rate: Positive[float] = 2.5e-4
    """Adam's step size at the start"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0 over the run; --no-anneal-lr keeps it constant"""
    lr_warmup_iterations: NonNegative[int] = 0
    """iterations over which the learning rate first rises linearly to its value; 0: none"""
    gamma: Fraction[float] = 0.99
    """discount factor"""
    gae_lambda: Fraction[float] = 0.95
    """lambda of generalized advantage estimation: 0 trusts the values, 1 the rewards"""
    num_minibatches: Positive[int] = 4
    """optimizer steps per epoch; divides the steps of each environment"""
    update_epochs: Positive[int] = 4
    """passes over the data of an iteration"""
    grad_accumulation_steps: Positive[int] = 1
    """parts in which each process computes its minibatch: the same gradient with less memory"""
    activation_checkpointing: bool = False
    """recompute the network's activations in the backward pass: less memory, about a third more computation"""
    norm_adv: bool = True
    """normalize the advantages within each minibatch"""
    clip_coef: NonNegative[float] = 0.1
    """clipping range of the probability ratio, and of the value's change"""
    clip_vloss: bool = True
    """clip the value loss as baselines does"""
    ent_coef: NonNegative[float] = 0.01
    """weight of the entropy bonus"""
    vf_coef: NonNegative[float] = 0.5
    """weight of the value loss"""
    max_grad_norm: Positive[float] = 0.5
    """the gradient is scaled down to this norm where it is longer"""
    target_kl: Positive[float] | None = None
    """end the iteration's epochs when its mean approx_kl exceeds this"""


# === Environment ======================================================================================================
def make_env(
    env_id,
    seed,
    capture_video,
    run_name,
    noop_max=30,
    frame_skip=4,
    screen_size=84,
    episodic_life=True,
    fire_reset=True,
    clip_reward=True,
    frame_stack=4,
    max_episode_frames=108_000,  # 30 minutes of play, then truncated
):
    """A function that makes one environment. `AtariGame` explains the keywords; they act in this order."""
    return lambda: AtariGame(
        env_id,
        seed,
        noop_max=noop_max,
        frame_skip=frame_skip,
        screen_size=screen_size,
        episodic_life=episodic_life,
        fire_reset=fire_reset,
        clip_reward=clip_reward,
        frame_stack=frame_stack,
        max_episode_frames=max_episode_frames,
        recorder=VideoRecorder(f"videos/{run_name}") if capture_video else None,
    )


# === Agent ============================================================================================================
def layer_init(layer, std=2**0.5, bias_const=0.0):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    """Policy and value on one convolutional network (Mnih et al. 2015). Observations x: uint8 (N, 4, 84, 84)."""

    def __init__(self, envs, activation_checkpointing=False, precision="fp32"):
        super().__init__()
        self.activation_checkpointing = activation_checkpointing
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32  # of the activations, not the weights
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, 8, stride=4)),  # (N, 4, 84, 84) -> (N, 32, 20, 20)
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),  # -> (N, 64, 9, 9)
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)),  # -> (N, 64, 7, 7)
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
        )
        self.actor = layer_init(nn.Linear(512, envs.single_action_space.n), std=0.01)
        self.critic = layer_init(nn.Linear(512, 1), std=1)

    def hidden(self, x):
        if self.activation_checkpointing and torch.is_grad_enabled():
            # In chunks: recomputed all at once, the activations would reach the same peak again.
            return torch.cat([checkpoint(self.encode, part, use_reentrant=False) for part in x.chunk(8)])
        return self.encode(x)

    def encode(self, x):
        x = x.contiguous(memory_format=torch.channels_last).to(self.dtype, copy=True).div_(255.0)
        with torch.autocast(x.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.network(x).float()  # (N, 512)

    def get_value(self, x):
        return self.critic(self.hidden(x))  # (N, 1)

    def get_action_and_value(self, x, action=None, noise=None):
        """Returns (action, logprob, entropy, value) of shapes (N,), (N,), (N,), (N, 1).

        Without an action, one is sampled: the arg-max of logits + Gumbel noise (N, n_actions) follows the policy
        (Maddison et al. 2014, https://arxiv.org/abs/1411.0030).
        """
        hidden = self.hidden(x)
        logits = self.actor(hidden)
        if action is None:
            action = (logits + (gumbel(logits.shape).to(x.device) if noise is None else noise)).argmax(1)
        logprobs = F.log_softmax(logits, dim=1)
        entropy = -(logprobs.exp() * logprobs).sum(1)
        return action, logprobs.gather(1, action.long()[:, None])[:, 0], entropy, self.critic(hidden)


def gumbel(shape, generator=None):
    """Standard Gumbel noise from a CPU generator."""
    return -torch.empty(shape).exponential_(generator=generator).log()


# === Advantages =======================================================================================================
def compute_gae(rewards, values, dones, next_value, next_done, gamma, gae_lambda):
    """Generalized advantage estimation (Schulman et al. 2016, https://arxiv.org/abs/1506.02438, eq. 16).

    rewards, values, dones: (num_steps, num_envs); next_value, next_done: (num_envs,), of the observation after the
    last step. dones[t] is 1 if the observation at t opens a new episode, so step t bootstraps on dones[t + 1].
    Returns (advantages, returns), each (num_steps, num_envs).
    """
    values_after = torch.cat([values[1:], next_value.view(1, -1)])
    discounts = gamma * (1.0 - torch.cat([dones[1:], next_done.view(1, -1)]))
    deltas = rewards + discounts * values_after - values
    advantages = torch.empty_like(deltas)
    following = torch.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantages[t] = following = deltas[t] + gae_lambda * discounts[t] * following
    return advantages, advantages + values


def learning_rate(args, iteration, num_iterations):
    """Linear warm-up, then linear annealing, where they are asked for; iterations count from 1."""
    warmup = min(1.0, iteration / args.lr_warmup_iterations) if args.lr_warmup_iterations else 1.0
    anneal = 1.0 - (iteration - 1.0) / num_iterations if args.anneal_lr else 1.0
    return args.learning_rate * warmup * anneal


def main(args, on_exit):
    """Train. `process.run` closes what is registered on `on_exit`, however the run ends."""
    # === Setup ========================================================================================================
    device = process.pick_device(args.cuda)
    args, saved = load_checkpoint(args)  # saved: {} in a new run
    num_envs = args.num_envs
    if args.batch_size is not None:
        args.require("batch_size", args.batch_size % num_envs == 0, f"must be a multiple of the {num_envs} envs")
    num_steps = args.num_steps if args.batch_size is None else args.batch_size // num_envs
    batch_size = num_steps * num_envs  # transitions per iteration
    minibatch_size = batch_size // args.num_minibatches
    smallest_part = minibatch_size
    num_iterations = args.total_timesteps // batch_size
    args.require("num_minibatches", num_steps % args.num_minibatches == 0, f"must divide the {num_steps} steps per env")
    args.require("num_minibatches", minibatch_size > 1, "leaves minibatches of 1 transition; 2 are the least")
    fits = args.grad_accumulation_steps <= smallest_part
    args.require("grad_accumulation_steps", fits, f"must be at most the {smallest_part} transitions it divides")
    args.require("total_timesteps", num_iterations > 0, f"must be at least the {batch_size} of one iteration")
    check_game(args)
    check_wandb_login(args)

    generator = seeding.seed_everything(args.seed, args.torch_deterministic)
    run_name = make_run_folder(args, args.env_id)
    logger = open_logger(args, run_name, num_iterations * batch_size, saved)
    on_exit.callback(logger.close)
    seeds = enumerate(seeding.env_seeds(args.seed, 0, num_envs))
    thunks = [make_env(args.env_id, s, args.capture_video and e == 0, run_name) for e, s in seeds]
    envs = make_vector(thunks, args.vector_env)
    on_exit.callback(envs.close)

    agent = Agent(envs, args.activation_checkpointing, args.precision).to(device, memory_format=torch.channels_last)
    load_weights(agent, saved.get("agent"))
    if args.compile:
        agent.encode = torch.compile(agent.encode)
    params = list(agent.parameters())
    optimizer = optim.Adam(params, lr=args.learning_rate, eps=1e-5, fused=True)  # eps: baselines' value
    # Every parameter's grad is a view of this buffer, so that one operation clears, clips or sums the gradient.
    flat_grad = torch.zeros(sum(p.numel() for p in params), device=device)
    for p, g in zip(params, flat_grad.split([p.numel() for p in params]), strict=True):
        p.grad = g.as_strided(p.shape, p.stride())

    c, h, w = envs.single_observation_space.shape
    obs = torch.zeros((num_steps, num_envs, h, w, c), dtype=torch.uint8, device=device)  # channels last
    actions = torch.zeros((num_steps, num_envs), dtype=torch.long, device=device)
    logprobs, values = torch.zeros((2, num_steps, num_envs), device=device).unbind()
    rewards, dones = torch.zeros((2, num_steps, num_envs)).unbind()  # on the CPU: no copy, so no waiting, per step

    global_step = saved.get("global_step", 0)  # environment steps of the whole job
    if "envs" in saved:  # go on where the checkpoint was written
        optimizer.load_state_dict(saved["optimizer"])
        generator.set_state(saved["generator"])
        states, next_obs, next_done = zip(*saved["envs"], strict=True)
        envs.set_attr("state", states)
        next_obs, infos = np.stack(next_obs), {}
        restore_random(saved["random"])
    else:
        next_obs, infos = envs.reset()
        next_done = np.zeros(num_envs)
    games = [(global_step, *game) for game in finished_games(infos)]  # (global_step, episodic_return, episodic_length)
    next_obs = process.upload(next_obs, device)  # (num_envs, 4, 84, 84)
    next_done = torch.as_tensor(next_done, dtype=torch.float32)
    clock = Stopwatch("env", "inference", "update", "allreduce", "checkpoint")
    stop_signal = process.StopSignal()

    for iteration in range(saved.get("iteration", 0) + 1, num_iterations + 1):
        optimizer.param_groups[0]["lr"] = learning_rate(args, iteration, num_iterations)

        # === Rollout ==================================================================================================
        noise = gumbel((num_steps, num_envs, envs.single_action_space.n), generator).to(device)
        # In bf16, this context also keeps the cast weights from step to step.
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            for step in range(num_steps):
                obs[step] = next_obs.movedim(1, -1)
                dones[step] = next_done  # 1 if obs[step] opens a new episode
                action, logprobs[step], _, value = agent.get_action_and_value(next_obs, noise=noise[step])
                actions[step], values[step] = action, value[:, 0]
                action = action.cpu().numpy()
                clock.lap("inference")

                next_obs, reward, terminated, truncated, infos = envs.step(action)
                global_step += batch_size // num_steps
                next_obs = process.upload(next_obs, device)
                next_done = torch.as_tensor(terminated | truncated, dtype=torch.float32)
                rewards[step] = torch.as_tensor(reward)
                cut = truncated & ~terminated
                if cut.any():
                    final_obs = process.upload(np.stack(infos["final_obs"][cut]), device)
                    rewards[step, torch.as_tensor(cut)] += args.gamma * agent.get_value(final_obs)[:, 0].cpu()
                games += [(global_step, *game) for game in finished_games(infos)]
                clock.lap("env")

            next_value = agent.get_value(next_obs)[:, 0]
        advantages, returns = compute_gae(
            rewards.to(device), values, dones.to(device), next_value, next_done.to(device), args.gamma, args.gae_lambda
        )

        # === Update: change the objective here; only the mb_* tensors are needed ======================================
        b_obs = obs.flatten(0, 1)  # (num_steps, num_envs, 84, 84, 4) -> (batch, 84, 84, 4); row t * num_envs + e
        b_actions, b_logprobs = actions.flatten(), logprobs.flatten()
        b_advantages, b_returns, b_values = advantages.flatten(), returns.flatten(), values.flatten()
        loss_sums = torch.zeros(6, device=device)  # over the iteration's minibatches, in the order of `loss_names`
        updates = 0

        for _epoch in range(args.update_epochs):
            # Each environment's steps are permuted by themselves and cut in num_minibatches parts; minibatch k is
            # the k-th part of every environment.
            order = torch.rand((num_envs, num_steps), generator=generator).argsort(1)
            rows = order * num_envs + torch.arange(num_envs)[:, None]  # (num_envs, num_steps), rows of the batch
            b_inds = rows.view(num_envs, args.num_minibatches, -1).transpose(0, 1).flatten(1).to(device)
            b_adv = b_advantages[b_inds].double()  # (num_minibatches, minibatch)
            moments = torch.stack([b_adv.sum(1), b_adv.square().sum(1)])
            adv_mean = moments[0] / minibatch_size
            adv_std = ((moments[1] - moments[0] * adv_mean) / (minibatch_size - 1)).clamp(min=0).sqrt()

            for k, mb_all in enumerate(b_inds):
                flat_grad.zero_()
                for mb_inds in mb_all.tensor_split(args.grad_accumulation_steps):
                    mb_obs = b_obs.index_select(0, mb_inds).movedim(-1, 1)  # (minibatch, 4, 84, 84)
                    mb_returns, mb_values = b_returns[mb_inds], b_values[mb_inds]
                    mb_advantages = b_advantages[mb_inds]
                    if args.norm_adv:
                        mb_advantages = (mb_advantages - adv_mean[k]) / (adv_std[k] + 1e-8)

                    _, newlogprob, entropy, newvalue = agent.get_action_and_value(mb_obs, b_actions[mb_inds])
                    newvalue = newvalue[:, 0]
                    logratio = newlogprob - b_logprobs[mb_inds]
                    ratio = logratio.exp()

                    pg_loss = -torch.min(
                        mb_advantages * ratio,
                        mb_advantages * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef),
                    ).sum()
                    v_loss = (newvalue - mb_returns).square()
                    if args.clip_vloss:
                        v_clipped = mb_values + (newvalue - mb_values).clamp(-args.clip_coef, args.clip_coef)
                        v_loss = torch.max(v_loss, (v_clipped - mb_returns).square())
                    v_loss = 0.5 * v_loss.sum()
                    entropy = entropy.sum()
                    loss = (pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss) / minibatch_size
                    loss.backward()

                    with torch.no_grad():  # approx_kl: http://joschu.net/blog/kl-approx.html
                        clipped = ((ratio - 1.0).abs() > args.clip_coef).sum()
                        kl = -logratio.sum(), (logratio.expm1() - logratio).sum()  # ratio - 1 would round it away
                        loss_sums += torch.stack([v_loss, pg_loss, entropy, *kl, clipped]) / minibatch_size

                flat_grad *= (args.max_grad_norm / (flat_grad.norm() + 1e-6)).clamp(max=1.0)
                optimizer.step()
                updates += 1

            if args.target_kl is not None:
                approx_kl = loss_sums[4] / updates
                if approx_kl > args.target_kl:
                    break

        # === Logging ==================================================================================================
        y, error = b_returns.double(), (b_returns - b_values).double()
        asked = torch.tensor(float(stop_signal.asked), device=device)
        sums = torch.stack([y.sum(), y.square().sum(), error.sum(), error.square().sum(), asked, flat_grad.sum()])
        totals = torch.cat([loss_sums.double() / updates, sums])
        totals = totals.tolist()
        clock.lap("update")
        if not np.isfinite(totals).all():
            raise Fault(f"iteration {iteration}: a loss or gradient is not finite: {totals[:6]}")

        loss_names = ("value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")
        metrics = {f"losses/{name}": total for name, total in zip(loss_names, totals[:6], strict=True)}
        y, y_square, error, error_square = totals[6:10]
        variance, error_variance = y_square - y * y / batch_size, error_square - error * error / batch_size
        metrics["losses/explained_variance"] = 1.0 - error_variance / max(variance, 1e-8)
        metrics["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
        metrics |= {f"time/{part}": share for part, share in clock.shares().items()}
        logger.games(games)
        games = []
        logger.metrics(metrics, global_step)

        stop = totals[10] > 0 and iteration < num_iterations  # a process got SIGTERM or SIGINT: all leave here
        if stop or iteration == num_iterations or iteration % (args.checkpoint_every or num_iterations) == 0:
            env_states = list(zip(game_states(envs), next_obs.cpu(), next_done.tolist(), strict=True))
            state = dict(agent=agent.state_dict(), optimizer=optimizer.state_dict(), generator=generator.get_state())
            save_checkpoint(args, logger, iteration, global_step, env_states, state)
            clock.lap("checkpoint")
        if stop:
            raise process.Stopped(f"after iteration {iteration}; --resume --run-name {run_name} continues it")

    logger.final(global_step, sum(p.detach().double().sum() for p in params))


if __name__ == "__main__":
    process.run(main, Args, __file__)
