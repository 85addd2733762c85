"""Write kvzip/coding/normal.py: the normal distribution and the grid of deviations as integers.

    python tools/make_normal_table.py > kvzip/coding/normal.py

The numbers are computed with 60 decimal digits from the Taylor series, so they are the same wherever this runs. They
are committed all the same: the format depends on them.
"""

from decimal import Decimal, getcontext

getcontext().prec = 60
STEPS, RANGE, BITS = 64, 6, 30
DEVIATIONS, NARROWEST, WIDEST = 64, Decimal("0.15"), Decimal(12)


def normal_cdf(z: Decimal) -> Decimal:
    """1/2 + phi(z) * sum of z^(2k+1) / (1 * 3 * ... * (2k+1)): all terms positive, so nothing cancels."""
    term = total = z
    k = 1
    while term > Decimal(10) ** -50:
        term = term * z * z / (2 * k + 1)
        total += term
        k += 1
    pi = Decimal("3.14159265358979323846264338327950288419716939937510582097494")
    return Decimal("0.5") + total * (-z * z / 2).exp() / (2 * pi).sqrt()


def rows(numbers: list[int]) -> str:
    lines, line = [], "   "
    for number in numbers:
        if len(line) + len(str(number)) + 2 > 118:
            lines.append(line)
            line = "   "
        line += f" {number},"
    return "\n".join([*lines, line])


def main() -> None:
    cdf = [round(normal_cdf(Decimal(k) / STEPS) * 2**BITS) for k in range(STEPS * RANGE + 1)]
    ratio = (WIDEST / NARROWEST).ln() / (DEVIATIONS - 1)
    deviations = [round(NARROWEST * (ratio * j).exp() * 2**16) for j in range(DEVIATIONS)]
    print(
        f'''"""Integers of the normal distribution. Written by tools/make_normal_table.py; part of the format."""

CDF_STEPS = {STEPS}
"""Entries of CDF per unit of z."""

CDF_BITS = {BITS}
"""Entries are multiples of 2**-CDF_BITS."""

# fmt: off
CDF = (
{rows(cdf)}
)
"""The cumulative normal distribution at z = k / CDF_STEPS, k = 0 .. {STEPS * RANGE}."""

DEVIATIONS = (
{rows(deviations)}
)
"""Standard deviations of the table family, in 1/65536 of a symbol: geometric from {NARROWEST} to {WIDEST}."""
# fmt: on'''
    )


if __name__ == "__main__":
    main()
