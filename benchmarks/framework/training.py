"""Training that resumes from its last checkpoint and gives the same numbers."""

from __future__ import annotations

import bisect
import io
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from benchmarks.framework import parallel
from benchmarks.framework.benchmark import Case
from benchmarks.framework.processes import BenchmarkError, Show
from benchmarks.framework.results import Row, replace_file

C = TypeVar("C", bound=Case)


def num_parameters(model: torch.nn.Module) -> int:
    """The number of learnt parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def nearest_width(parameters: int, build: Callable[[int], torch.nn.Module]) -> int:
    """The multiple of four for which the model `build(width)` comes nearest to this number of parameters."""

    def excess(width: int) -> int:
        with torch.device("meta"):
            return num_parameters(build(width)) - parameters

    widths = range(4, 2**20, 4)
    place = max(bisect.bisect_left(widths, 0, key=excess), 1)
    return min(widths[place - 1 : place + 1], key=lambda width: abs(excess(width)))


def computing_time(device: str) -> float:
    """This process's processor time in seconds, which depends little on other loads; on a GPU, the clock's time."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


def seed_iteration(seed: int, iteration: int) -> None:
    """Seeds all generators with these two numbers only, so that their states need not be saved."""
    parallel.seed(int(np.random.SeedSequence((seed, iteration)).generate_state(1)[0]))


class Training(ABC, Generic[C]):
    """A model under training. Its random numbers must depend on the case and the iteration only.

    Args:
        case: What is trained.
        folder: The folder of checkpoints. Training resumes from the case's checkpoint, if it exists. Each row has its
            own checkpoint.
        model: The model.
        optimizer: Its optimizer.
        iterations: The number of iterations.
        evaluate_every: The number of iterations between evaluations.
        clip: The largest norm of all gradients together; `None` disables clipping.
        clock: Returns the time in seconds. (default: the time of day)
        save_every: A checkpoint follows an evaluation if at least this many seconds have passed since the last one, and
            always follows the last evaluation. (default: 0)
    """

    watched: ClassVar[str] = "val_loss"
    """The entry of the curve's points that progress reports show and that must be finite."""
    keeps_random_state: ClassVar[bool] = False
    """Whether a checkpoint holds the state of PyTorch's generators, for random numbers that no iteration seeds."""

    def __init__(
        self,
        case: C,
        folder: Path,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        iterations: int,
        evaluate_every: int,
        clip: float | None,
        clock: Callable[[], float] = time.perf_counter,
        save_every: float = 0.0,
    ):
        self.case = case
        self.path = case.checkpoint(folder)
        self.model: Any = model  # subclasses define its methods
        self.optimizer = optimizer
        self.iterations = iterations
        self.evaluate_every = evaluate_every
        self.clip = clip
        self.clock = clock
        self.save_every = save_every
        self._saved_at = time.monotonic()
        self.iteration = 0
        self.curve: list[dict[str, float]] = []
        self.seconds: list[float] = []
        self.evaluation_seconds = 0.0
        self.losses: list[float] = []
        if parallel.of_first(self.path.exists()):
            self._resume()

    def learning_rate(self) -> float:
        """The learning rate of this iteration. (default: the optimizer's)."""
        rate: float = self.optimizer.defaults["lr"]
        return rate

    @abstractmethod
    def loss(self) -> Tensor:
        """The loss on this iteration's batch."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """A point of the learning curve, including `watched`; `self.losses` has the losses since the last point."""

    @abstractmethod
    def result(self) -> Row:
        """The columns of the finished training."""

    def stops_early(self) -> bool:
        """Whether training ends early; this must depend on the curve only. (default: never)."""
        return False

    @property
    def is_finished(self) -> bool:
        """Whether all iterations are done, or training ended early."""
        return self.iteration == self.iterations or self.stops_early()

    @property
    def _watched_name(self) -> str:
        return self.watched.replace("val_", "validation ").replace("_", " ")

    def run(self, show: Show) -> Row:
        """Trains to the end, reports progress to `show`, and returns the columns."""
        while True:
            text = f": {self._watched_name} {self.curve[-1][self.watched]:.4g}" if self.curve else ""
            show(self.iteration, self.iterations, text)
            if self.is_finished:
                return self.result()
            self.advance(1)

    def advance(self, count: int) -> None:
        """Trains for this many iterations, or as many as are left; evaluates and saves when that is due."""
        for _ in range(count):
            if self.is_finished:
                return
            self.step()
            if self.iteration % self.evaluate_every == 0 or self.iteration == self.iterations:
                self.add_point()
                is_due = self.is_finished or time.monotonic() - self._saved_at >= self.save_every
                if is_due and parallel.rank() == 0:
                    self._save()
                    self._saved_at = time.monotonic()

    def step(self) -> None:
        """Trains for one iteration."""
        start = self.clock()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        loss = self.loss()
        self.optimizer.zero_grad()
        loss.backward()
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.losses.append(loss.item())
        self.seconds.append(self.clock() - start)
        self.iteration += 1

    @torch.no_grad()
    def add_point(self) -> None:
        """Evaluates the model.

        Raises:
            FloatingPointError: If the watched value is not finite.
        """
        start = self.clock()
        self.model.eval()
        self.losses = parallel.mean(self.losses)
        point = parallel.of_first(self.evaluate())
        self.model.train()
        if not math.isfinite(point[self.watched]):
            text = f"the {self._watched_name} became {point[self.watched]} in iteration {self.iteration} of {self.case}"
            raise FloatingPointError(text)
        self.curve.append(point)
        self.losses = []
        self.evaluation_seconds += self.clock() - start

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        device: torch.device = next(iter(self.model.parameters())).device
        return device

    def _save(self) -> None:
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "iteration": self.iteration,
            "curve": self.curve,
            "seconds": self.seconds,
            "evaluation_seconds": self.evaluation_seconds,
        }
        if self.keeps_random_state:
            state["random"] = [torch.get_rng_state()]
            if self.device.type == "cuda":
                state["random"].append(torch.cuda.get_rng_state(self.device))
        content = io.BytesIO()
        torch.save(state, content)
        replace_file(self.path, content.getvalue())

    def _resume(self) -> None:
        try:
            state = torch.load(self.path, map_location=self.device, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.iteration, self.curve = state["iteration"], state["curve"]
            self.seconds, self.evaluation_seconds = state["seconds"], state["evaluation_seconds"]
            if self.keeps_random_state:
                host, *others = (part.cpu() for part in state["random"])
                torch.set_rng_state(host)
                for part in others:
                    torch.cuda.set_rng_state(part, self.device)
        except OSError:
            raise
        except Exception as error:  # damaged files raise many kinds of errors
            raise BenchmarkError(
                f"the checkpoint {self.path} is damaged ({type(error).__name__}); delete it, and the same command "
                f"trains {self.case} from the start"
            ) from error
