/* libnvidia-ml.so.1 for tests: as many GPUs as its control file says, with every trouble it says.

The file named by FAKE_NVML is read anew at each call. One setting a line; CARD is the number of a card, which stays
with it in whatever order the cards are shown, or * for all:

  order 0 1 2 ...           the card shown at each index
  init CODE                 what nvmlInit answers
  generation N              a number that rises when the driver is loaded anew: what was initialised before is void
  hang CALL                 that call never answers
  error CARD CALL CODE      that call answers so for a card
  used CARD BYTES           memory in use
  total CARD BYTES
  proc CARD PID BYTES       a compute process; BYTES -1: not told
  draw CARD PID BYTES       a graphics process
  mig CARD COUNT            MIG is on, with so many instances
  power CARD MILLIWATTS
  util CARD PERCENT

CALL is the name of the function without nvmlDevice, Get and a version: Name, MemoryInfo, ComputeRunningProcesses.
Source of the functions and structures: NVML API reference. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, SMALL = 7, MAX_CARDS = 16 };
typedef unsigned long long u64;
typedef struct { int card, instance; } Device;
typedef struct { unsigned pid; u64 memory; unsigned gpu_instance, compute_instance; } Process;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { u64 total, free, used; } Memory;
typedef struct { unsigned version; u64 total, reserved, free, used; } MemoryV2;

static Device devices[MAX_CARDS][16];
static int generation = -1;

static FILE *control(void) {
    const char *path = getenv("FAKE_NVML");
    return path ? fopen(path, "r") : NULL;
}

/* The last line `key CARD value` that fits; `fallback` when there is none. */
static long long of_card(const char *key, int card, long long fallback) {
    char line[512], word[64], which[16];
    long long value;
    FILE *file = control();
    if (!file) return fallback;
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "%63s %15s %lld", word, which, &value) == 3 && !strcmp(word, key)
            && (which[0] == '*' || atoi(which) == card))
            fallback = value;
    fclose(file);
    return fallback;
}

static long long setting(const char *key, long long fallback) {
    char line[512], word[64];
    long long value;
    FILE *file = control();
    if (!file) return fallback;
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "%63s %lld", word, &value) == 2 && !strcmp(word, key)) fallback = value;
    fclose(file);
    return fallback;
}

static int order(int *cards) {
    char line[512];
    int count = 0;
    FILE *file = control();
    if (!file) return 0;
    while (fgets(line, sizeof line, file))
        if (!strncmp(line, "order", 5))
            for (char *word = strtok(line + 5, " \n"); word && count < MAX_CARDS; word = strtok(NULL, " \n"))
                cards[count++] = atoi(word);
    fclose(file);
    return count;
}

/* Hangs, or the code a call is to answer for a card (-1: for none). */
static int fate(const char *call, int card) {
    char line[512], word[64], first[64], second[64];
    int code, answer = OK;
    FILE *file = control();
    if (!file) return OK;
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "%63s %63s", word, first) == 2 && !strcmp(word, "hang") && !strcmp(first, call)) {
            fclose(file);
            for (;;) pause();
        }
        if (sscanf(line, "%63s %63s %63s %d", word, first, second, &code) == 4 && !strcmp(word, "error")
            && (first[0] == '*' || atoi(first) == card) && (second[0] == '*' || !strcmp(second, call)))
            answer = code;
    }
    fclose(file);
    if (answer == OK && strcmp(call, "Init") && generation != setting("generation", 0)) answer = UNINITIALIZED;
    return answer;
}

#define MEET(call, card) do { int code_ = fate(call, card); if (code_ != OK) return code_; } while (0)
#define NO_INSTANCE(device) do { if ((device)->instance >= 0) return NOT_SUPPORTED; } while (0)

const char *nvmlErrorString(int code) {
    switch (code) {
        case 1: return "Uninitialized";
        case 3: return "Not Supported";
        case 9: return "Driver Not Loaded";
        case 15: return "GPU is lost";
        case 18: return "Driver/library version mismatch";
        case 999: return "Unknown Error";
        default: return "some other error";
    }
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    MEET("Init", -1);
    int code = (int)setting("init", OK);
    if (code == OK) generation = (int)setting("generation", 0);
    return code;
}

int nvmlShutdown(void) { generation = -1; return OK; }

int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "580.95.05"); return OK; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    int cards[MAX_CARDS];
    MEET("Count", -1);
    *count = (unsigned)order(cards);
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    int cards[MAX_CARDS];
    if ((int)index >= order(cards)) return INVALID;
    MEET("HandleByIndex", cards[index]);
    *device = &devices[cards[index]][0];
    (*device)->card = cards[index];
    (*device)->instance = -1;
    return OK;
}

int nvmlDeviceGetUUID(Device *d, char *text, unsigned size) {
    MEET("UUID", d->card);
    if (d->instance < 0) snprintf(text, size, "GPU-00000000-0000-4000-8000-%012d", d->card);
    else snprintf(text, size, "MIG-00000000-0000-5000-8000-%010d%02d", d->card, d->instance);
    return OK;
}

int nvmlDeviceGetName(Device *d, char *text, unsigned size) {
    MEET("Name", d->card);
    snprintf(text, size, d->instance < 0 ? "NVIDIA Test 80GB" : "NVIDIA Test 80GB MIG 3g.40gb");
    return OK;
}

static long long total_of(Device *d) {
    return of_card("total", d->card, 80LL << 30) / (d->instance < 0 ? 1 : 2);
}

static long long used_of(Device *d) { return of_card("used", d->card, d->instance < 0 ? 4LL << 20 : 0); }

int nvmlDeviceGetMemoryInfo(Device *d, Memory *memory) {
    MEET("MemoryInfo", d->card);
    memory->total = (u64)total_of(d);
    memory->used = (u64)used_of(d);
    memory->free = memory->total - memory->used;
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(Device *d, MemoryV2 *memory) {
    MEET("MemoryInfo", d->card);
    memory->reserved = 0;
    memory->total = (u64)total_of(d);
    memory->used = (u64)used_of(d);
    memory->free = memory->total - memory->used;
    return OK;
}

int nvmlDeviceGetUtilizationRates(Device *d, Utilization *rates) {
    MEET("UtilizationRates", d->card);
    NO_INSTANCE(d);
    rates->gpu = (unsigned)of_card("util", d->card, 10 * d->card);
    rates->memory = 1;
    return OK;
}

#define NUMBER(function, call, type, value)                                   \
    int function(Device *d, type *out) {                                      \
        MEET(call, d->card);                                                  \
        NO_INSTANCE(d);                                                       \
        *out = (type)(value);                                                 \
        return OK;                                                            \
    }

NUMBER(nvmlDeviceGetPowerUsage, "PowerUsage", unsigned, of_card("power", d->card, 70500))
NUMBER(nvmlDeviceGetEnforcedPowerLimit, "EnforcedPowerLimit", unsigned, 700000)
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, "CurrentClocksThrottleReasons", u64, 0x5)

int nvmlDeviceGetTemperature(Device *d, int sensor, unsigned *out) {
    (void)sensor;
    MEET("Temperature", d->card);
    NO_INSTANCE(d);
    *out = 40 + (unsigned)d->card;
    return OK;
}

int nvmlDeviceGetClockInfo(Device *d, int kind, unsigned *out) {
    MEET("ClockInfo", d->card);
    NO_INSTANCE(d);
    *out = kind == 1 ? 1980 : 2619;
    return OK;
}

int nvmlDeviceGetTotalEccErrors(Device *d, int kind, int counter, u64 *out) {
    (void)kind, (void)counter;
    MEET("TotalEccErrors", d->card);
    *out = 0;
    return OK;
}

static int processes(const char *key, Device *d, unsigned *count, Process *out) {
    char line[512], word[64];
    unsigned found = 0, room = *count;
    int card, pid;
    long long bytes;
    FILE *file = control();
    if (d->instance > 0) { if (file) fclose(file); *count = 0; return OK; }  /* the first instance has them */
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "%63s %d %d %lld", word, &card, &pid, &bytes) == 4 && !strcmp(word, key) && card == d->card) {
            if (out && found < room) out[found] = (Process){(unsigned)pid, (u64)bytes, ~0u, ~0u};
            found++;
        }
    if (file) fclose(file);
    *count = found;
    return found > room ? SMALL : OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device *d, unsigned *count, Process *out) {
    MEET("ComputeRunningProcesses", d->card);
    return processes("proc", d, count, out);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(Device *d, unsigned *count, Process *out) {
    MEET("GraphicsRunningProcesses", d->card);
    return processes("draw", d, count, out);
}

int nvmlDeviceGetMigMode(Device *d, unsigned *current, unsigned *pending) {
    MEET("MigMode", d->card);
    *current = *pending = of_card("mig", d->card, 0) > 0;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(Device *d, unsigned *count) { (void)d; *count = 7; return OK; }

int nvmlDeviceGetMigDeviceHandleByIndex(Device *d, unsigned index, Device **instance) {
    MEET("MigDeviceHandleByIndex", d->card);
    if ((long long)index >= of_card("mig", d->card, 0)) return NOT_FOUND;
    *instance = &devices[d->card][index + 1];
    (*instance)->card = d->card;
    (*instance)->instance = (int)index;
    return OK;
}
