"""ResNet against the same in torch, with torchvision's names."""

import datasets
from curves import Curve, classifies, sgd, torch_classifies
from models.resnet import BasicBlock, Bottleneck, ResNet


def torch_resnet(torch, *, is_bottleneck, layers, width, stem):
    nn, f = torch.nn, torch.nn.functional

    class Block(nn.Module):
        def __init__(self, inplanes, planes, stride):
            super().__init__()
            width = 4 * planes if is_bottleneck else planes
            if is_bottleneck:
                self.conv1 = nn.Conv2d(inplanes, planes, 1, bias=False)
                self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
                self.conv3 = nn.Conv2d(planes, width, 1, bias=False)
                self.bn3 = nn.BatchNorm2d(width)
            else:
                self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
                self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
            self.bn1, self.bn2 = nn.BatchNorm2d(planes), nn.BatchNorm2d(planes)
            if stride != 1 or inplanes != width:
                convolution = nn.Conv2d(inplanes, width, 1, stride, bias=False)
                self.downsample = nn.Sequential(convolution, nn.BatchNorm2d(width))

        def forward(self, x):
            short = self.downsample(x) if hasattr(self, "downsample") else x
            h = self.bn2(self.conv2(f.relu(self.bn1(self.conv1(x)))))
            if is_bottleneck:
                h = self.bn3(self.conv3(f.relu(h)))
            return f.relu(h + short)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            kernel, stride, padding = (7, 2, 3) if stem == "imagenet" else (3, 1, 1)
            self.conv1 = nn.Conv2d(1, width, kernel, stride, padding, bias=False)
            self.bn1 = nn.BatchNorm2d(width)
            inplanes = width
            for number, count in enumerate(layers):
                stage = []
                for place in range(count):
                    planes = width * 2**number
                    stage.append(Block(inplanes, planes, 2 if number and not place else 1))
                    inplanes = 4 * planes if is_bottleneck else planes
                setattr(self, f"layer{number + 1}", nn.Sequential(*stage))
            self.fc = nn.Linear(inplanes, 10)

        def forward(self, x):
            x = f.relu(self.bn1(self.conv1(x)))
            if stem == "imagenet":
                x = f.max_pool2d(x, 3, 2, 1)
            for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
                x = stage(x)
            return self.fc(f.adaptive_avg_pool2d(x, 1).flatten(1))

    return Net()


def curve(name, block, layers, width, stem, rows, size):
    return Curve(
        name,
        lambda: ResNet(block, layers, 10, channels=1, width=width, stem=stem),
        lambda torch: torch_resnet(
            torch, is_bottleneck=block is Bottleneck, layers=layers, width=width, stem=stem
        ),
        classifies,
        torch_classifies,
        lambda step: datasets.digits(rows, size=size, seed=step % 4),
        sgd(0.001),
        ("float32", "bfloat16"),
    )


CURVES = [
    curve("resnet18", BasicBlock, (2, 2, 2, 2), 4, "cifar", 8, 16),
    # Of 4 images torch's own autocast to bfloat16 is 0.3 off: the last statistics are of 4 numbers
    # an image. In float32 losses part by 1e-2 after 12 steps, as torch's in float64 do when its
    # weights are rounding off (`curves.ROUNDING`): a ReLU of the last stages turns.
    curve("resnet50 in short", Bottleneck, (1, 1, 1, 1), 4, "imagenet", 16, 64),
]


def test_it_learns_as_in_torch(learns_as_torch, curve, precision):
    learns_as_torch(curve, precision)
