"""The doctor finds planted faults, finds nothing in healthy trainings, and changes nothing."""

import copy
import math
import re
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pyro
import pytest
import torch
from pyro.util import get_rng_state
from torch import nn
from torch.utils.data import DataLoader

from pyro_l0 import BernoulliGate, HardConcrete
from pyro_l0.diagnostics import diagnose
from pyro_l0.diagnostics.doctor import Diagnosis, Finding, Unchecked
from pyro_l0.diagnostics.sites import gate_sites
from pyro_l0.infer import L0_ELBO, AutoGate, SparsityTarget
from pyro_l0.infer.elbo.terms import Term
from pyro_l0.nn import fix_gates
from tests.diagnostics.doctor_faults import FAULTS
from tests.diagnostics.doctor_runs import HEALTHY, digits, start, train
from tests.diagnostics.networks import cnn, mlp

QUICK = ("MLP, 60 steps", "MLP, one cycle", "regression by SVI, free energy")


def test_every_finding_has_a_planted_fault():
    """The codes that the docstring lists are those of the faults."""
    assert {fault.code for fault in FAULTS.values()} == set(re.findall(r'``"([a-z-]+)"``', diagnose.__doc__))


@pytest.mark.filterwarnings("ignore")  # trainings with faults are warned of as they go
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name):
    """Each by its own finding, with at most one beside it."""
    fault = FAULTS[name]
    diagnosis = start(fault.make).to(fault.share).diagnosis()
    assert fault.code in diagnosis.codes
    assert len(diagnosis.codes) <= 2


@pytest.mark.parametrize("name", QUICK)
def test_healthy_trainings_have_no_findings(name):
    """Soon after the start, in the middle and at the end; tests/bench/pruning/bench_doctor.py has the others."""
    run = start(HEALTHY[name])
    for look in (0.05, 0.5, 1.0):
        assert run.to(look).diagnosis().findings == ()


def state_of(run):
    """Whatever a training goes on from."""
    network, optimiser = run.network, run.optimiser
    return copy.deepcopy(
        {
            "weights": network.state_dict(),
            "gates": run.guide.state_dict(),
            "gradients": [x.grad for x in (*network.parameters(), *run.guide.parameters())],
            "optimiser": optimiser.state_dict(),
            "modes": [module.training for module in network.modules()],
            "objective": run.loss.elbo.state_dict(),
            "generators": get_rng_state(),  # of NumPy and of Python, too
            "store": {name: value.detach().clone() for name, value in pyro.get_param_store().items()},
        }
    )


def are_equal(one, other):
    """Whether two nested states are the same, bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(are_equal, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other


def test_a_diagnosis_changes_nothing():
    """Neither a BatchNorm network in training mode nor anything else, and the training goes on as it would have."""
    looked = start(HEALTHY["CNN"]).to(0.05)
    before = state_of(looked)
    first, second = looked.diagnosis(), looked.diagnosis()
    assert are_equal(before, state_of(looked))
    assert first == second
    looked.to(0.1)
    left_alone = start(HEALTHY["CNN"]).to(0.1)
    assert are_equal(looked.network.state_dict(), left_alone.network.state_dict())
    assert are_equal(looked.guide.state_dict(), left_alone.guide.state_dict())


def test_a_baseline_and_a_network_in_eval_mode_stay():
    """The score function's, which every loss with gradients moves."""
    options = {"family": BernoulliGate, "estimator": "score_function"}
    run = start(lambda: train(cnn(), digits((1, 8, 8)), **options)).to(0.02)
    run.network.eval()
    before = state_of(run)
    run.diagnosis()
    assert are_equal(before, state_of(run))


def test_a_loader_goes_on_where_it_was():
    """Its own generator shuffles the next epoch as if nobody had looked."""
    run = start(lambda: train(mlp(), digits()))
    data = [(x[0], y[0]) for x, y in digits(size=1)[:64]]

    def orders(look):
        loader = DataLoader(data, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(3))
        if look:
            run.diagnosis(batches=loader)
        return [y for _, labels in loader for y in labels.tolist()]

    assert orders(look=True) == orders(look=False)


def test_no_warnings_are_left_for_later():
    """What a guide watches does not count the runs of a diagnosis: its warning comes when it would have come."""
    run = start(FAULTS["gates not in the optimiser"].make).to(0.005)
    for _ in range(10):
        run.diagnosis()
    with pytest.warns(UserWarning, match="no optimiser has moved"):
        run.to(1.0)


@pytest.mark.parametrize(
    ("gate", "closing"),
    [
        (HardConcrete(torch.tensor([3.0, -5.0])), -math.log(11)),
        (HardConcrete(torch.tensor([3.0, -5.0], dtype=torch.float64), gamma=-0.2), -math.log(1.1 / 0.2)),
        (BernoulliGate(logits=torch.tensor([2.0, -1.0])), 0.0),
    ],
    ids=["hard concrete", "another stretch", "Bernoulli"],
)
def test_where_gates_close(gate, closing):
    """The hard concrete's test gate is 0 up to log alpha = log(-gamma / zeta)."""
    location = next(iter(gate.learned))
    guide = SimpleNamespace(posterior=lambda: {"z": gate}, locations=lambda: [getattr(gate, location)])
    (site,) = gate_sites(guide, [], is_opened=False)
    assert site.closing.tolist() == pytest.approx([closing] * 2, abs=1e-4)
    assert int((site.is_open & site.closing.isfinite()).sum()) == 1


def gates_alone(number=10, **options):
    """A guide of one site, and its model."""

    def model(y=None):
        z = pyro.sample("z", HardConcrete(torch.zeros(number)).to_event(1))
        pyro.sample("y", pyro.distributions.Normal(z.sum(), 1.0), obs=torch.tensor(3.0))

    guide = AutoGate(model, **options)
    guide()
    return model, guide


def test_what_was_not_given_is_not_checked():
    _, guide = gates_alone()
    diagnosis = diagnose(guide)
    assert diagnosis.findings == ()
    assert [x.give for x in diagnosis.unchecked] == [
        "the optimiser",
        "loss=L0_ELBO(...)(model, guide), or the target",
        "loss and batches",
        "steps_left=0 at the end, or the target",
        "network and batches",
        "network, batches and error",
    ]
    assert "Nothing is wrong" in str(diagnosis)
    assert "give the optimiser" in str(diagnosis)


def test_how_it_reads():
    finding = Finding("no-price", ("a", "b"), "lam is 0.", "Give a lam.")
    text = str(Diagnosis((finding, finding), (Unchecked("the price", "loss"),)))
    assert text.startswith("no-price at 'a', 'b': lam is 0.\n    Give a lam.")
    assert Diagnosis((finding, finding)).codes == ("no-price",)
    assert "Not checked:\n    the price: give loss" in text


def test_a_multiplier_at_its_limit():
    """A target knows it, and how many steps are left."""
    _, guide = gates_alone()
    counts = {"step": 300, "steps": 1000, "start": 20, "reached": 800}
    target = Mock(SparsityTarget, **counts, multiplier=torch.ones(2), saturated=torch.tensor([False, True]))
    optimiser = torch.optim.Adam(guide.parameters(), 0.1)
    diagnosis = diagnose(guide, optimiser, target=target)
    assert diagnosis.codes == ("multiplier-at-limit",)
    assert "1 of 2 budgets" in diagnosis.findings[0].seen
    target.saturated = torch.tensor([False, False])
    assert diagnose(guide, optimiser, target=target).findings == ()
    slow = torch.optim.Adam(guide.parameters(), 1e-4)
    assert diagnose(guide, slow, target=target).codes == ("rate-too-small",)
    target.multiplier = torch.zeros(2)
    assert diagnose(guide, optimiser, target=target).codes == ("no-price",)


def test_optimisers_of_several_kinds():
    """The gates may be in the second of two, or in one of Pyro's before its first step."""
    _, guide = gates_alone()
    others = torch.optim.SGD([torch.zeros(2, requires_grad=True)], 0.1)
    assert diagnose(guide, others, steps_left=100).codes == ("gates-not-trained",)
    assert diagnose(guide, [others, torch.optim.Adam(guide.parameters(), 0.1)], steps_left=100).findings == ()
    assert diagnose(guide, pyro.optim.Adam({"lr": 0.1}), steps_left=100).findings == ()
    assert diagnose(guide, pyro.optim.Adam({"lr": 1e-4}), steps_left=100).codes == ("rate-too-small",)


def test_a_schedule_that_has_not_risen_yet():
    """Its first rates are small, its largest counts."""
    _, guide = gates_alone()
    optimiser = torch.optim.Adam(guide.parameters(), 0.1)
    torch.optim.lr_scheduler.LinearLR(optimiser, start_factor=1e-3, total_iters=50)
    assert optimiser.param_groups[0]["lr"] < 1e-3
    assert diagnose(guide, optimiser, steps_left=100).findings == ()


def test_sites_of_different_prices():
    """A site without a group size is named, and the other is not."""
    run = start(lambda: train(mlp(), digits()))
    run.loss.elbo.group_size = {"2": 10.0, "5": 0.0}
    (finding,) = run.diagnosis().findings
    assert (finding.code, finding.sites) == ("no-price", ("5",))
    assert "group_size is 0" in finding.seen


OWN = Term("own", lambda block, options: block.active_prob.sum())


@pytest.mark.parametrize(
    ("elbo", "codes"),
    [
        (L0_ELBO("l0"), ("no-price",)),
        (L0_ELBO("l0", extra_terms=[OWN]), ()),  # only the objective's own coefficients are known to be 0
        (L0_ELBO(kl_scale=0.0), ("no-price",)),
        (L0_ELBO(kl_scale=lambda step: step / 100), ()),  # a schedule begins with 0
    ],
)
def test_what_is_a_price(elbo, codes):
    model, guide = gates_alone()
    assert diagnose(guide, loss=elbo(model, guide), batches=[()]).codes == codes


def test_posteriors_may_be_undecided():
    """With a prior, half-open gates are an answer; with a price they are unfinished."""
    model, guide = gates_alone(init_active_prob=0.6)
    for elbo, is_found in ((L0_ELBO("free_energy"), False), (L0_ELBO("l0", lam=0.1), True)):
        codes = diagnose(guide, loss=elbo(model, guide), batches=[()], steps_left=0).codes
        assert ("undecided-gates" in codes) is is_found


def test_a_site_that_drifts():
    """By where its gates stand: all have moved, by the same distance."""
    _, guide = gates_alone()
    with torch.no_grad():
        guide.locations()[0].sub_(1.5)
    (finding,) = diagnose(guide).findings
    assert (finding.code, finding.sites) == ("gates-drift-together", ("z",))
    with torch.no_grad():
        guide.locations()[0][:3] += 2.0
    assert diagnose(guide).findings == ()


@pytest.mark.slow
def test_statistics_count_once_a_budget_holds():
    """While it falls the deterministic network changes from look to look, and running statistics follow behind."""
    run = start(HEALTHY["residual CNN, a target of .2"], 3).to(0.5)
    assert run.target.start < run.target.step < run.target.reached
    assert run.diagnosis().findings == ()
    assert "the statistics of BatchNorm" in [left.what for left in run.diagnosis().unchecked]
    run.to(1.0)
    for layer in run.network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.reset_running_stats()
    assert run.diagnosis().codes == ("batch-norm-of-another-network",)


def test_recalibration_is_the_remedy():
    """After what the finding advises, it is gone."""
    run = start(FAULTS["BatchNorm reset"].make)
    assert run.diagnosis().codes == ("batch-norm-of-another-network",)
    fixed = fix_gates(run.network, run.guide.test_gates()).train()
    for _ in range(5):
        for images, _ in run.batches:
            fixed(images)
    statistics = {name: x for name, x in fixed.state_dict().items() if "running" in name or "num_batches" in name}
    run.network.load_state_dict(statistics, strict=False)
    assert run.diagnosis().findings == ()


def test_refusals():
    _, guide = gates_alone()
    with pytest.raises(TypeError, match="put it in a list"):
        diagnose(guide, batches=(torch.zeros(3), torch.zeros(3)))
    with pytest.raises(ValueError, match="steps_left of at least 0"):
        diagnose(guide, steps_left=-1)
    with pytest.raises(TypeError, match="of type LinearLR"):
        diagnose(guide, torch.optim.lr_scheduler.LinearLR(torch.optim.Adam(guide.parameters())))
    with pytest.raises(TypeError, match="locations"):
        diagnose(lambda: None)
