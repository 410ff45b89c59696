"""How unlikely a sum of skew terms is, in standard deviations of a normal number.

A sum of few independent terms is not normal: its tail on the side of its skew is heavier, the other
lighter. With its first three cumulants (those of the terms, added) it is taken for a Pearson type
III variable, a shifted gamma, and the cube root of a gamma variable is nearly normal.

Sources: Wilson and Hilferty 1931, The distribution of chi-square; Kite 1977, Frequency and risk
analyses in hydrology, as the frequency factor of Pearson III.
"""

import math


def normal_z(total: float, variance: float, third_cumulant: float) -> float:
    """The normal number with the tail probability of a sum of expectation 0.

    Args:
        total: the sum.
        variance: its second cumulant; 0 gives 0.
        third_cumulant: 0 gives the sum in standard deviations.
    """
    if variance <= 0.0:
        return 0.0
    z, skewness = total / math.sqrt(variance), third_cumulant / variance**1.5
    if abs(skewness) < 1e-6:
        return z
    sixth = skewness / 6.0
    # Beyond the end of a gamma variable's range the cube root goes on, far out
    return (math.cbrt(1.0 + 3.0 * sixth * z) - 1.0 + sixth**2) / sixth
