"""A deep Q-network learns to balance a pole on a cart (Barto, Sutton & Anderson, 1983).

python examples/dqn_cartpole.py [--steps 20000]
"""

import argparse

import numpy as np
import picture
from models.dqn import DQN

import actorflow as af

BATCH, KEPT, LONGEST = 64, 20_000, 500
FOLLOW_EVERY, FOLLOW_BY = 10, 0.1


class CartPole:
    """The cart, its speed, the pole's angle and its speed; pushed left or right 50 times a second.

    An episode ends when the pole leans 12 degrees, the cart has left the track, or after 500 steps.
    """

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def reset(self):
        self.state, self.steps = self.rng.uniform(-0.05, 0.05, 4), 0
        return self.state.astype(np.float32)

    def step(self, action):
        """Push; return the next state, and whether the pole fell."""
        gravity, pole, cart, half, force, tick = 9.8, 0.1, 1.0, 0.5, 10.0, 0.02
        _x, speed, angle, turn = self.state
        sin, cos, mass = np.sin(angle), np.cos(angle), pole + cart
        push = (force if action else -force) + pole * half * turn**2 * sin
        bend = (gravity * sin - cos * push / mass) / (half * (4 / 3 - pole * cos**2 / mass))
        shove = (push - pole * half * bend * cos) / mass
        self.state = self.state + tick * np.array([speed, shove, turn, bend])
        self.steps += 1
        fell = abs(self.state[0]) > 2.4 or abs(self.state[2]) > np.radians(12)
        return self.state.astype(np.float32), bool(fell)


class Memory:
    """The last steps that were played, of which a batch is a random choice."""

    def __init__(self, seed):
        self.rows = {name: np.zeros((KEPT, 4), np.float32) for name in ("state", "after")}
        self.rows |= {name: np.zeros(KEPT, np.float32) for name in ("reward", "goes_on")}
        self.rows["action"] = np.zeros(KEPT, np.int32)
        self.count, self.rng = 0, np.random.default_rng(seed)

    def add(self, **step):
        for name, value in step.items():
            self.rows[name][self.count % KEPT] = value
        self.count += 1

    def batch(self):
        chosen = self.rng.integers(0, min(self.count, KEPT), BATCH)
        return {name: rows[chosen] for name, rows in self.rows.items()}


@af.job(optimizer=af.optim.Adam(5e-4), trainable=["online.*"], clip_norm=10.0)
def train(model, batch):
    return model.loss(batch)


@af.job(train=False)
def act(model, batch):
    return {"action": model(batch.state).argmax(1)}


def greedy(model, state):
    return int(act.step(model, {"state": state[None]})["action"][0])


def learn(model, steps, seed=0):
    """Play and learn, one update a step; return how long each episode lasted."""
    world, memory, rng = CartPole(seed), Memory(seed), np.random.default_rng(seed)
    state, lengths = world.reset(), []
    for step in range(steps):
        chance = max(0.05, 1.0 - 4 * step / steps)
        action = int(rng.integers(2)) if rng.random() < chance else greedy(model, state)
        after, fell = world.step(action)
        memory.add(state=state, action=action, after=after, reward=1.0, goes_on=not fell)
        state = after
        if fell or world.steps == LONGEST:
            lengths.append(world.steps)
            state = world.reset()
        train.step(model, memory.batch())
        if step % FOLLOW_EVERY == 0:
            model.follow(FOLLOW_BY)
        if step % 500 == 0:
            print(f"\rstep {step} of {steps}, {len(lengths)} episodes", end="", flush=True)
    return lengths


def played(model, episodes, seed):
    """Return how long the pole stood in some episodes in which nothing is left to chance."""
    world, lengths = CartPole(seed), []
    for _ in range(episodes):
        state, fell = world.reset(), False
        while not fell and world.steps < LONGEST:
            state, fell = world.step(greedy(model, state))
        lengths.append(world.steps)
    return lengths


def main():
    parser = argparse.ArgumentParser(description="Train a deep Q-network on CartPole.")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--episodes", type=int, default=10, help="to play at the end")
    parser.add_argument(
        "--png", default="runs/dqn_cartpole.png", help="where the picture is written"
    )
    args = parser.parse_args()

    model = DQN()
    lengths = learn(model, args.steps)
    stood = np.mean(played(model, args.episodes, seed=1))
    print(
        f"\nthe pole stands for {stood:.0f} of {LONGEST} steps; it stood for {lengths[0]} at first"
    )
    picture.write_png(args.png, picture.curves({"steps": lengths}))
    print(f"the length of each episode: {args.png}")


if __name__ == "__main__":
    main()
