"""What a new job asks of the host, compared with what the host has: what can never be given is refused at once."""

from eagle3_core.contract.params import StageParams
from server.domain.resources import CannotBeMet, Resources, check_device, check_host, resolve
from server.errors import FieldError, Invalid, Unavailable
from server.services.hardware import Hardware


def settle(hardware: Hardware, asked: Resources, params: StageParams, pointer: str) -> Resources:
    """The request with defaults filled in and GPUs by UUID.

    While NVML cannot be asked, a number of GPUs that the stage decides stays open, and the job waits for an answer.

    Args:
        hardware: what is known of the host.
        asked: as it came.
        params: of the stage.
        pointer: JSON pointer to the job in the request.

    Raises:
        Invalid: the host can never give it, or it contradicts the parameters.
        Unavailable: an index cannot be turned into a UUID, as NVML cannot be asked.
    """
    given = params.model_dump()
    try:
        check_device(asked, given.get("device"))
        check_host(asked, hardware.cpus, hardware.ram_bytes)
        unknown = hardware.gpus_unknown()
        if unknown is None:
            return resolve(asked, params.stage, given, hardware.gpus({}))
    except CannotBeMet as error:
        place = "params" if error.field == "device" else "resources"
        raise Invalid.of([FieldError(f"{pointer}/{place}/{error.field}", error.message)]) from None
    indices = [name for name in asked.gpu_ids if name[0].isdigit()]
    if indices:
        text = f"GPU {indices[0]} cannot be turned into a UUID now: {unknown}. Name UUIDs, or try again"
        raise Unavailable(text, [FieldError(f"{pointer}/resources/gpu_ids", text)])
    return asked.model_copy(update={"gpus": len(asked.gpu_ids)}) if asked.gpu_ids else asked
