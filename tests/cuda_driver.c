// What the CUDA launcher uses of the driver and of NVRTC, for machines that have neither: it runs nothing, and writes down what it is asked.
// By the environment: FAKE_CUDA_LOG, where; FAKE_CUDA_DRIVER, its version; FAKE_CUDA_DEVICES and FAKE_CUDA_KNOWN, the architectures of the
// devices and those that NVRTC knows; FAKE_CUDA_NVRTC, its major version; FAKE_CUDA_REFUSED, the kernel that it does not compile;
// FAKE_CUDA_UNLOADED, any text: the driver loads nothing.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

static const char* given(const char* name, const char* otherwise) { return getenv(name) ? getenv(name) : otherwise; }

static void note(const char* format, ...) {
  char line[512];
  va_list all;
  va_start(all, format);
  vsnprintf(line, sizeof line, format, all);
  va_end(all);
  FILE* file = fopen(given("FAKE_CUDA_LOG", "/dev/null"), "a");
  fputs(line, file);
  fclose(file);
}

static int numbers(const char* list, int* out) {
  int count = 0;
  for (char* end; *list; list = *end ? end + 1 : end) {
    const int number = (int)strtol(list, &end, 10);
    if (out) out[count] = number;
    ++count;
  }
  return count;
}

static const char* devices(void) { return given("FAKE_CUDA_DEVICES", "90"); }

API int cuInit(unsigned flags) { return (int)flags; }
API int cuDriverGetVersion(int* version) { return *version = atoi(given("FAKE_CUDA_DRIVER", "13000")), 0; }
API int cuGetErrorName(int error, const char** name) { return *name = error ? "FAKE_ERROR" : "FAKE_SUCCESS", 0; }
API int cuGetErrorString(int error, const char** words) { return *words = error ? "as asked for" : "", 0; }
API int cuDeviceGetCount(int* count) { return *count = numbers(devices(), NULL), 0; }
API int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
API int cuDeviceGetAttribute(int* value, int attribute, int device) {
  int all[8];
  numbers(devices(), all);
  *value = attribute == 75 ? all[device] / 10 : all[device] % 10;
  return 0;
}
API int cuCtxGetDevice(int* device) { return *device = atoi(given("FAKE_CUDA_CURRENT", "0")), 0; }
API int cuThreadExchangeStreamCaptureMode(int* mode) { return note("mode %d\n", *mode), *mode = 0, 0; }
API int cuLibraryLoadData(void** library, const void* code, void* a, void* b, unsigned c, void* d, void* e, unsigned f) {
  if (getenv("FAKE_CUDA_UNLOADED") || a || b || c || d || e || f) return 209;
  note("load %.*s\n", (int)strcspn(code, "\n"), (const char*)code);
  return *library = strdup(code), 0;
}
API int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  return !strncmp(library, "\x7f" "ELF", 4) || strstr(library, name) ? *kernel = strdup(name), 0 : 500;
}
API int cuLaunchKernel(void* kernel, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz, unsigned shared, void* stream,
                       void** arguments, void** extra) {
  note("launch %s %u %u shared %u\n", (const char*)kernel, x * y * z, tx * ty * tz, shared);
  return stream || extra || !arguments;
}
API int cuMemsetD8Async(void* at, unsigned char value, size_t bytes, void* stream) { return note("fill %zu\n", bytes), !at || value != 0xff || stream; }

typedef struct {
  char *text, *name, *log, *code;
} Program;

API int nvrtcVersion(int* major, int* minor) { return *major = atoi(given("FAKE_CUDA_NVRTC", "13")), *minor = 0, 0; }
static const char* known(void) { return given("FAKE_CUDA_KNOWN", "75,80,86,90,100"); }
API int nvrtcGetNumSupportedArchs(int* count) { return *count = numbers(known(), NULL), 0; }
API int nvrtcGetSupportedArchs(int* all) { return numbers(known(), all), 0; }
API int nvrtcCreateProgram(Program** program, const char* text, const char* name, int headers, const char** sources, const char** names) {
  *program = calloc(1, sizeof **program);
  (*program)->text = strdup(text);
  (*program)->name = strdup(name);
  return headers != 1 || *sources[0] || strcmp(names[0], "metal_stdlib");
}
API int nvrtcDestroyProgram(Program** program) { return *program = NULL, 0; }
API int nvrtcCompileProgram(Program* program, int count, const char** options) {
  char all[256] = "";
  for (int i = 0; i < count; ++i) strcat(strcat(all, options[i]), " ");
  note("compile %s %s\n", program->name, all);
  usleep(1000 * atoi(given("FAKE_CUDA_MS", "0")));
  note("compiled %s\n", program->name);
  program->log = strdup(strcmp(program->name, given("FAKE_CUDA_REFUSED", "")) ? "" : "line 7: this is refused");
  const char* entry = strstr(program->text, "extern \"C\" __global__");
  const size_t size = strlen(program->text) + 128;
  program->code = malloc(size);
  snprintf(program->code, size, "%s of %s\n%s", all, program->name, entry ? entry : "");
  return *program->log ? 6 : 0;
}
API int nvrtcGetProgramLogSize(Program* program, size_t* size) { return *size = strlen(program->log) + 1, 0; }
API int nvrtcGetProgramLog(Program* program, char* log) { return strcpy(log, program->log), 0; }
API int nvrtcGetCUBINSize(Program* program, size_t* size) { return *size = strlen(program->code) + 1, 0; }
API int nvrtcGetCUBIN(Program* program, char* code) { return strcpy(code, program->code), 0; }
API int nvrtcGetPTXSize(Program* program, size_t* size) { return *size = strlen(program->code) + 5, 0; }
API int nvrtcGetPTX(Program* program, char* code) { return strcat(strcpy(code, "PTX "), program->code), 0; }
