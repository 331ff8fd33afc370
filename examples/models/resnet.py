"""ResNet (He et al., 2015) with torchvision's names and first values.

It is version 1.5: a bottleneck has its stride in the 3 x 3 convolution, not in the first 1 x 1.
"""

import actorflow as af
from actorflow import nn


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, inplanes, planes, stride=1):
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        if stride != 1 or inplanes != planes:
            self.downsample = _projection(inplanes, planes, stride)

    def __call__(self, x):
        h = af.relu(self.bn1(self.conv1(x)))
        return af.relu(self.bn2(self.conv2(h)) + _shortcut(self, x))


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, inplanes, planes, stride=1):
        width = planes * self.expansion
        self.conv1 = nn.Conv2d(inplanes, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        if stride != 1 or inplanes != width:
            self.downsample = _projection(inplanes, width, stride)

    def __call__(self, x):
        h = af.relu(self.bn1(self.conv1(x)))
        h = af.relu(self.bn2(self.conv2(h)))
        return af.relu(self.bn3(self.conv3(h)) + _shortcut(self, x))


class ResNet(nn.Module):
    """x [N, channels, H, W] -> scores [N, num_classes].

    `layers` are the blocks of each of the four stages, of `width`, twice, four and eight times as
    many channels. `stem` is "imagenet", a 7 x 7 convolution of stride 2 and a pool, or "cifar", a
    3 x 3 alone, for pictures of some 32 pixels. `zero_init_residual` starts every block as its
    shortcut (Goyal et al., 2017).
    """

    def __init__(
        self,
        block,
        layers,
        num_classes=1000,
        *,
        channels=3,
        width=64,
        stem="imagenet",
        zero_init_residual=False,
    ):
        self.stem = stem
        if stem == "imagenet":
            self.conv1 = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
        else:
            self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        inplanes = width
        for number, blocks in enumerate(layers):
            planes, stage = width << number, []
            for place in range(blocks):
                stage.append(block(inplanes, planes, 2 if number and not place else 1))
                inplanes = planes * block.expansion
            setattr(self, f"layer{number + 1}", nn.Sequential(*stage))
        self.fc = nn.Linear(inplanes, num_classes)
        for _, module in self.named_modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif zero_init_residual and isinstance(module, BasicBlock):
                nn.init.zeros_(module.bn2.weight)
            elif zero_init_residual and isinstance(module, Bottleneck):
                nn.init.zeros_(module.bn3.weight)

    def __call__(self, x):
        x = af.relu(self.bn1(self.conv1(x)))
        if self.stem == "imagenet":
            x = af.max_pool2d(x, 3, stride=2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


def resnet18(num_classes=1000, **options):
    """11.7 M parameters for 1000 classes."""
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes, **options)


def resnet50(num_classes=1000, **options):
    """25.6 M parameters for 1000 classes."""
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes, **options)


def _projection(inplanes, planes, stride):
    return nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))


def _shortcut(block, x):
    return block.downsample(x) if hasattr(block, "downsample") else x
