"""LeNet-5 (LeCun et al., 1998) for 28 x 28 pictures, with the names of torch's tutorials.

As there: ReLU and the largest of each window, where the paper has sigmoids and weighted means.
"""

import actorflow as af
from actorflow import nn


class LeNet5(nn.Module):
    """61,706 parameters for ten classes; x [N, channels, 28, 28] -> scores [N, classes]."""

    def __init__(self, num_classes=10, channels=1):
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_classes)

    def __call__(self, x):
        x = af.max_pool2d(af.relu(self.conv1(x)), 2)
        x = af.max_pool2d(af.relu(self.conv2(x)), 2)
        x = af.relu(self.fc1(x.flatten(1)))
        return self.fc3(af.relu(self.fc2(x)))
