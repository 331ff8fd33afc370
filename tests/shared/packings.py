"""Instances of the placement problem with a known answer, and a check of a packing."""


def has_packing(rows, capacity):
    """Whether a packing exists, by trying every offset of every buffer in turn."""
    rows = sorted(rows, key=lambda r: -r[2])
    offsets = []

    def place(i):
        if i == len(rows):
            return True
        lower, upper, size = rows[i]
        near = [
            (offsets[j], offsets[j] + rows[j][2])
            for j in range(i)
            if rows[j][0] < upper and lower < rows[j][1]
        ]
        for x in range(capacity - size + 1):
            if all(x + size <= first or last <= x for first, last in near):
                offsets.append(x)
                if place(i + 1):
                    return True
                offsets.pop()
        return False

    return place(0)


def is_packing(rows, offsets, capacity):
    for i, (lower, upper, size) in enumerate(rows):
        if offsets[i] < 0 or offsets[i] + size > capacity:
            return False
        for j in range(i):
            meets = lower < rows[j][1] and rows[j][0] < upper
            if meets and offsets[i] < offsets[j] + rows[j][2] and offsets[j] < offsets[i] + size:
                return False
    return True


def tight_instance(num_sections, capacity, rng):
    """Fill every section to the capacity, as random buffers that need not fit without waste."""
    room = [capacity] * num_sections
    rows = []
    while any(room):
        first = rng.choice([s for s in range(num_sections) if room[s]])
        size = rng.randint(1, room[first])
        last = first + 1
        while last < num_sections and room[last] >= size and rng.random() < 0.7:
            last += 1
        for s in range(first, last):
            room[s] -= size
        rows.append((first, last, size))
    return rows
