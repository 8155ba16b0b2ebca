"""When an attempt's limits are passed: the clock is moved by hand."""

import signal

import pytest

from raycluster.errors import RemoteError
from raycluster.reports import Delivery
from raycluster.watch import Limits, Sigterm, Watch, sigterm_handled

LIMITS = Limits(start_s=100, stall_s=10, save_s=20)


class Silent(Delivery):
    """A driver's end that nobody listens to."""

    stop_asked = False

    def ask_to_stop(self):
        self.stop_asked = True


@pytest.fixture
def driver():
    driver = Silent(None)
    driver.next_attempt()
    return driver


def passed(driver, limits=LIMITS, reported=True, sigterm=None):
    return Watch(limits, driver, sigterm or Sigterm(), (), reported, lambda _: None)._passed()


def test_a_first_report_may_take_long_and_the_next_ones_may_not(driver):
    driver.begun_s -= 50
    assert passed(driver) is None
    driver.count({"step": 1})
    assert passed(driver) is None
    driver.last_s -= 11
    assert passed(driver) == "no report for 10 s: hung?"
    assert passed(driver, Limits(stall_s=None)) is None


def test_workers_that_never_report_or_never_start_are_given_up(driver):
    driver.begun_s -= 101
    assert passed(driver) == "no report in 100 s from the start: hung?"
    assert passed(driver, reported=False) == "no sign of a worker in 100 s from the start: hung?"
    assert passed(driver, Limits(start_s=None)) is None


def test_a_program_that_never_reports_by_design_has_only_to_start(driver):
    driver.count({"started": None})
    driver.begun_s -= 101
    driver.last_s -= 101
    assert passed(driver, reported=False) is None
    assert driver.reports == 0


def test_workers_that_do_not_save_in_time_are_aborted_as_preempted(driver):
    sigterm = Sigterm()
    driver.count({"step": 1})
    aborted, said = [], []
    watch = Watch(Limits(save_s=0), driver, sigterm, (), True, said.append)
    sigterm.asked = True
    with pytest.raises(RemoteError) as failure, watch.over(lambda: aborted.append(True)):
        while not aborted:
            pass
        raise RemoteError("ActorDiedError", "aborted", 1, "")
    assert driver.stop_asked
    assert failure.value.preempted
    assert "SIGTERM came, and the workers did not save and end in 0 s" in failure.value.message
    assert said == ["SIGTERM came: the workers save and end, within 0 s; a second one ends them at once"]


def test_sigterm_before_the_first_report_waits_for_nothing(driver):
    sigterm = Sigterm()
    sigterm.asked = True
    assert passed(driver, sigterm=sigterm) == "SIGTERM came before the first report: nothing is lost"
    assert not driver.stop_asked
    assert passed(driver, reported=False, sigterm=sigterm) is None
    assert driver.stop_asked


def test_sigterm_between_attempts_and_a_second_one_end_at_once():
    before = signal.getsignal(signal.SIGTERM)
    with sigterm_handled() as sigterm:
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGTERM)
        assert ended.value.code == 143
        done = []
        with pytest.raises(SystemExit) as ended, sigterm.noted(done.append):
            signal.raise_signal(signal.SIGTERM)
            done.append("saved")
            signal.raise_signal(signal.SIGTERM)
            done.append("never reached")
        assert (ended.value.code, done) == (143, ["saved"])
    assert signal.getsignal(signal.SIGTERM) == before
