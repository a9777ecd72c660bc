from .routes import WeightRoutes as WeightRoutes
from .sync import Offer as Offer
from .sync import WeightReceiver as WeightReceiver
from .sync import WeightSender as WeightSender
from .sync import WeightVersionError as WeightVersionError
from .sync import copy_weights as copy_weights
from .sync import is_whole as is_whole
