// Constants of elementary.cu, as tests/cuda/test_constants.py computes them again.
#pragma once

constexpr double LN2_HEAD = 0x1.62e42fefa3800p-1;  // ln 2 cut to 42 bits: k * head is exact for |k| < 2^11
constexpr double LN2_MIDDLE = 0x1.ef35793c76730p-45;
constexpr double LN2_TAIL = 0x1.f97b57a079a19p-103;
constexpr double LOG2_E = 0x1.71547652b82fep+0;

constexpr int EXP_DEGREE = 22;
// 1 / n! as pairs.
__constant__ double EXP_TERMS[EXP_DEGREE + 1][2] = {
    {0x1.0000000000000p+0, 0x0.0p+0},  // 1 / 0!
    {0x1.0000000000000p+0, 0x0.0p+0},  // 1 / 1!
    {0x1.0000000000000p-1, 0x0.0p+0},  // 1 / 2!
    {0x1.5555555555555p-3, 0x1.5555555555555p-57},  // 1 / 3!
    {0x1.5555555555555p-5, 0x1.5555555555555p-59},  // 1 / 4!
    {0x1.1111111111111p-7, 0x1.1111111111111p-63},  // 1 / 5!
    {0x1.6c16c16c16c17p-10, -0x1.f49f49f49f49fp-65},  // 1 / 6!
    {0x1.a01a01a01a01ap-13, 0x1.a01a01a01a01ap-73},  // 1 / 7!
    {0x1.a01a01a01a01ap-16, 0x1.a01a01a01a01ap-76},  // 1 / 8!
    {0x1.71de3a556c734p-19, -0x1.c154f8ddc6c00p-73},  // 1 / 9!
    {0x1.27e4fb7789f5cp-22, 0x1.cbbc05b4fa99ap-76},  // 1 / 10!
    {0x1.ae64567f544e4p-26, -0x1.c062e06d1f209p-80},  // 1 / 11!
    {0x1.1eed8eff8d898p-29, -0x1.2aec959e14c06p-83},  // 1 / 12!
    {0x1.6124613a86d09p-33, 0x1.f28e0cc748ebep-87},  // 1 / 13!
    {0x1.93974a8c07c9dp-37, 0x1.05d6f8a2efd1fp-92},  // 1 / 14!
    {0x1.ae7f3e733b81fp-41, 0x1.1d8656b0ee8cbp-97},  // 1 / 15!
    {0x1.ae7f3e733b81fp-45, 0x1.1d8656b0ee8cbp-101},  // 1 / 16!
    {0x1.952c77030ad4ap-49, 0x1.ac981465ddc6cp-103},  // 1 / 17!
    {0x1.6827863b97d97p-53, 0x1.eec01221a8b0bp-107},  // 1 / 18!
    {0x1.2f49b46814157p-57, 0x1.2650f61dbdcb4p-112},  // 1 / 19!
    {0x1.e542ba4020225p-62, 0x1.ea72b4afe3c2fp-120},  // 1 / 20!
    {0x1.71b8ef6dcf572p-66, -0x1.d043ae40c4647p-120},  // 1 / 21!
    {0x1.0ce396db7f853p-70, -0x1.aebcdbd20331cp-124},  // 1 / 22!
};

constexpr double INVERSE_ROOT_2_PI = 0x1.9884533d43651p-2, INVERSE_ROOT_2_PI_LOW = -0x1.cbc0d30ebfd15p-56;

// Phi(-a) = e^(-a^2 / 2) p(t) / (1 + a), t = (a - 5) / (a + 5): the coefficients of p, as in arithmetic/normal_tail.py.
constexpr int TAIL_DEGREE = 22;
__constant__ double TAIL_TERMS[TAIL_DEGREE + 1] = {
    0x1.d8979b0f2b39dp-2, -0x1.76ff86859eb14p-4, 0x1.fc66cc64a13eap-6, 0x1.47c1d0305474fp-7,
    -0x1.b08e0007b4e8cp-6, 0x1.92037bab49469p-6, -0x1.f11aab030739ap-7, 0x1.ab6d038c8a8c4p-8,
    -0x1.b75f4f80ed596p-10, 0x1.0571b5ffdab27p-17, 0x1.7e61e0ec54a33p-13, -0x1.c1b1ef584aae1p-15,
    -0x1.4c0dd523771a7p-17, 0x1.3006db7bbffdcp-17, -0x1.2ec94c78d2587p-24, -0x1.5f890b8ce196bp-20,
    0x1.1212f445e7893p-23, 0x1.acb3817c4618cp-23, -0x1.ab849faf7ecfdp-26, -0x1.23e88197d90c1p-25,
    0x1.6db23d2ff053dp-30, 0x1.6e9ff92639ba0p-28, 0x1.33cfe739f0c9dp-30
};
