"""The tail of the normal distribution: a polynomial for kernels in float64.

Phi(-a) = e^(-a^2 / 2) p(t) / (1 + a), t = (a - 5) / (a + 5), for 0 <= a <= 20: p interpolates at the 23 Chebyshev nodes of
that range of t (Schonfelder, 1978, for this change of variable) and is off by less than 2^-53 of its value.
"""

CENTER = 5.0

TERMS = tuple(
    float.fromhex(term)
    for term in (
        "0x1.d8979b0f2b39dp-2",
        "-0x1.76ff86859eb14p-4",
        "0x1.fc66cc64a13eap-6",
        "0x1.47c1d0305474fp-7",
        "-0x1.b08e0007b4e8cp-6",
        "0x1.92037bab49469p-6",
        "-0x1.f11aab030739ap-7",
        "0x1.ab6d038c8a8c4p-8",
        "-0x1.b75f4f80ed596p-10",
        "0x1.0571b5ffdab27p-17",
        "0x1.7e61e0ec54a33p-13",
        "-0x1.c1b1ef584aae1p-15",
        "-0x1.4c0dd523771a7p-17",
        "0x1.3006db7bbffdcp-17",
        "-0x1.2ec94c78d2587p-24",
        "-0x1.5f890b8ce196bp-20",
        "0x1.1212f445e7893p-23",
        "0x1.acb3817c4618cp-23",
        "-0x1.ab849faf7ecfdp-26",
        "-0x1.23e88197d90c1p-25",
        "0x1.6db23d2ff053dp-30",
        "0x1.6e9ff92639ba0p-28",
        "0x1.33cfe739f0c9dp-30",
    )
)
"""The coefficients of t^0, t^1, ..., t^22."""
