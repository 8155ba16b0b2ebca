import pytest

from gemma_ray.reporting.units import count, duration, interval, milliseconds, percent, size, usd


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (count(1244), "1,244"),
        (count(None), "–"),
        (percent(0.641), "64.1 %"),
        (interval((0.1, 0.255)), "10.0–25.5 %"),
        (milliseconds(45.06), "45.1"),
        (milliseconds(7202.4), "7,202"),
        (duration(9.84), "9.8 s"),
        (duration(59.97), "1 min 00 s"),
        (duration(3.34 * 3600), "3 h 20 min"),
        (duration(3599.9), "1 h 00 min"),
        (size(1000), "1000 B"),
        (size(62_500_000_000), "58.2 GiB"),
        (usd(56.114), "$56.11"),
        (usd(0.0849), "$0.0849"),
        (usd(0), "$0.00"),
    ],
)
def test_numbers_read_as_people_write_them(shown, expected):
    assert shown.replace("\xa0", " ") == expected
