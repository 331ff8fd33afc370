"""Copies in and out, both at once, and what they take from a product that runs beside them."""

from __future__ import annotations

from functools import partial

from gpu.opened import device_seconds, open_driver
from gpu.section import Findings, Place
from gpu.sections.ceilings import SIDE, Product

SIZE_BYTES, PRODUCTS = 256 << 20, 8


def run(found: Findings, place: Place) -> None:
    driver = open_driver(place)
    size, side = (1 << 16, 64) if place.is_emulated else (SIZE_BYTES, SIDE)
    there = [driver.allocate(size) for _ in range(2)]
    here = [driver.allocate_pinned(size) for _ in range(2)]
    inwards, outwards, compute = [driver.make_stream(n) for n in ("in", "out", "compute")]
    driver.fill_later(there[1], 0x3C, size, outwards)

    def copy_in() -> None:
        driver.copy_later(there[0], here[0], size, inwards)

    def copy_out() -> None:
        driver.copy_later(here[1], there[1], size, outwards)

    def both() -> None:
        copy_in()
        copy_out()

    for name, run_one, times in (("in", copy_in, 1), ("out", copy_out, 1), ("both", both, 2)):
        seconds = device_seconds(driver, run_one, 0.1)
        found.metric(f"{name}_gb_s", times * size / seconds / 1e9)
    product = Product.made(driver, side)

    def products() -> None:
        for _ in range(PRODUCTS):
            product.put(compute)

    alone_s = device_seconds(driver, products, 0.2)
    both_s = device_seconds(driver, both, 0.1)
    # As many copies as the products last, so that these never run alone.
    count = 1 if place.is_emulated else max(1, int(0.8 * alone_s / both_s))
    found.metric("copies_beside", count)

    def beside(copy: partial) -> None:
        for _ in range(count):
            copy()
        products()

    for name, copy in (("beside_compute", copy_in), ("both_beside_compute", both)):
        found.metric(name, device_seconds(driver, partial(beside, copy), 0.2) / alone_s)
