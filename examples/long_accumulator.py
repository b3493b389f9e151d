"""A product cut over K into parts of any size: digits are added, then rounded once, and every cut gives the same bytes."""

import torch

from det_lightning import det_combine, det_finalize, det_gemm, det_gemm_partial


def main() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 1000, generator=generator)
    w = torch.randn(32, 1000, generator=generator)
    whole = det_gemm(x, w)
    for cut in ([500, 500], [1, 998, 1], [100] * 10):
        parts = [det_gemm_partial(a, b) for a, b in zip(x.split(cut, dim=1), w.split(cut, dim=1), strict=True)]
        exact = det_finalize(det_combine(parts)).view(torch.int32)
        stock = sum(a @ b.t() for a, b in zip(x.split(cut, dim=1), w.split(cut, dim=1), strict=True)).view(torch.int32)
        print(
            f"cut into {len(cut):2} parts: det differs in {int((exact != whole.view(torch.int32)).sum())} of "
            f"{whole.numel()} results, float32 from its own uncut product in "
            f"{int((stock != (x @ w.t()).view(torch.int32)).sum())}"
        )


if __name__ == "__main__":
    main()
