"""U-Net against the same in torch."""

import datasets
from curves import Curve, adamw, classifies, torch_classifies
from models.unet import UNet

CLASSES, WIDTH, DEPTH = 11, 4, 2


def torch_unet(torch):
    nn = torch.nn

    def double(channels, results):
        layers = []
        for wide in (channels, results):
            layers.append(nn.Conv2d(wide, results, 3, padding=1, bias=False))
            layers += [nn.BatchNorm2d(results), nn.ReLU()]
        return nn.Sequential(*layers)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inc = double(1, WIDTH)
            self.down = nn.ModuleList([double(4, 8), double(8, 16)])
            self.up = nn.ModuleList([
                nn.ConvTranspose2d(16, 8, 2, stride=2), nn.ConvTranspose2d(8, 4, 2, stride=2)
            ])  # fmt: skip
            self.join = nn.ModuleList([double(16, 8), double(8, 4)])
            self.outc = nn.Conv2d(WIDTH, CLASSES, 1)

        def forward(self, x):
            first = self.inc(x)
            second = self.down[0](nn.functional.max_pool2d(first, 2))
            third = self.down[1](nn.functional.max_pool2d(second, 2))
            h = self.join[0](torch.cat([second, self.up[0](third)], 1))
            return self.outc(self.join[1](torch.cat([first, self.up[1](h)], 1)))

    return Net()


CURVES = [
    Curve(
        "unet",
        lambda: UNet(CLASSES, width=WIDTH, depth=DEPTH),
        torch_unet,
        classifies,
        torch_classifies,
        lambda step: datasets.scenes(2, size=16, seed=step % 4),
        adamw(3e-3),
        ("float32", "bfloat16"),
    )
]


def test_it_learns_as_in_torch(learns_as_torch, curve, precision):
    learns_as_torch(curve, precision)
