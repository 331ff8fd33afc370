"""VGG-16 (Simonyan & Zisserman, 2014), with batch norm or without, by torchvision's names."""

import actorflow as af
from actorflow import nn

VGG16 = (1, 1, "M", 2, 2, "M", 4, 4, 4, "M", 8, 8, 8, "M", 8, 8, 8, "M")
"""Channels of each convolution, in multiples of the first's, and pools that halve the picture."""


class VGG(nn.Module):
    """x [N, channels, H, W] -> scores [N, num_classes], 138 M parameters as published.

    `width` are the channels of the first convolution, `hidden` those of the classifier, and
    `pooled` the rows and columns that it sees: 7 for 224 pixels, 1 for 32.
    """

    def __init__(
        self,
        layers=VGG16,
        num_classes=1000,
        *,
        batch_norm=False,
        channels=3,
        width=64,
        hidden=4096,
        pooled=7,
        dropout=0.5,
    ):
        features = []
        for multiple in layers:
            if multiple == "M":
                features.append(nn.MaxPool2d(2, 2))
                continue
            convolution = nn.Conv2d(channels, channels := multiple * width, 3, padding=1)
            nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(convolution.bias)
            norm = [nn.BatchNorm2d(channels)] if batch_norm else []
            features += [convolution, *norm, nn.ReLU()]
        self.features = nn.Sequential(*features)
        self.pooled = pooled
        self.classifier = nn.Sequential(
            nn.Linear(channels * pooled**2, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, num_classes),
        )
        for layer in self.classifier:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, 0.0, 0.01)
                nn.init.zeros_(layer.bias)

    def __call__(self, x):
        x = af.adaptive_avg_pool2d(self.features(x), self.pooled)
        return self.classifier(x.flatten(1))


def vgg16(num_classes=1000, **options):
    return VGG(VGG16, num_classes, **options)


def vgg16_bn(num_classes=1000, **options):
    return VGG(VGG16, num_classes, batch_norm=True, **options)
