"""LeNet-5 against torch's tutorial."""

import datasets
from curves import Curve, classifies, sgd, torch_classifies
from models.lenet import LeNet5


def torch_lenet(torch):
    nn, f = torch.nn, torch.nn.functional

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
            self.conv2 = nn.Conv2d(6, 16, 5)
            self.fc1 = nn.Linear(400, 120)
            self.fc2 = nn.Linear(120, 84)
            self.fc3 = nn.Linear(84, 10)

        def forward(self, x):
            x = f.max_pool2d(f.relu(self.conv1(x)), (2, 2))
            x = f.max_pool2d(f.relu(self.conv2(x)), 2)
            x = torch.flatten(x, 1)
            x = f.relu(self.fc1(x))
            x = f.relu(self.fc2(x))
            return self.fc3(x)

    return Net()


CURVES = [
    Curve(
        "lenet",
        LeNet5,
        torch_lenet,
        classifies,
        torch_classifies,
        lambda step: datasets.digits(16, seed=step % 4),
        sgd(0.05),
        ("float32", "bfloat16"),
    )
]


def test_it_learns_as_in_torch(learns_as_torch, curve, precision):
    learns_as_torch(curve, precision)
