/* A stand-in for libamdhip64 and libhiprtc: checks every call against the documented interface, writes it to
 * the file $STANDIN_LOG, and runs kernels by calling their host build in $STANDIN_KERNELS.
 *
 * Compiled twice, with -DRUNTIME and with -DCOMPILER. "Compiling" reads the kernel's parameters from the
 * source; the "code object" is text: a first line, target, symbol and a letter per parameter (p: pointer,
 * i: int). $STANDIN_FAIL = "function:status" makes that call fail; "function:status:once" only the first time.
 * $STANDIN_TARGET is what the device executes; $STANDIN_CORRUPT makes every launch spoil its result,
 * or those of one symbol.
 */
#include <ctype.h>
#include <dlfcn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void record(const char* format, ...) {
  const char* path = getenv("STANDIN_LOG");
  if (!path || !*path) return;
  char line[1024];
  va_list args;
  va_start(args, format);
  vsnprintf(line, sizeof line, format, args);
  va_end(args);
  FILE* file = fopen(path, "a"); /* one write each: processes and threads share the file */
  if (!file) abort();
  fprintf(file, "%s\n", line);
  fclose(file);
}

/* The planted status of a function, or `otherwise`. */
static int planted(const char* function, int otherwise) {
  const char* plan = getenv("STANDIN_FAIL");
  size_t length = strlen(function);
  if (!plan || strncmp(plan, function, length) || plan[length] != ':') return otherwise;
  int status = atoi(plan + length + 1);
  if (strstr(plan + length + 1, ":once")) setenv("STANDIN_FAIL", "", 1);
  return status;
}

static const char kMagic[] = "stand-in object";
enum { kMaxParameters = 64 };

#ifdef COMPILER
/* ------------------------------------------------------------------------------------------------ hipRTC */
enum { kOk = 0, kInvalidInput = 3, kInvalidProgram = 4, kInvalidOption = 5, kCompilation = 6, kInternal = 11 };

typedef struct {
  uint32_t alive;
  char* source;
  char name[128];
  char code[512];
  char log[512];
} Program;
enum { kAlive = 0x600d600d };

const char* hiprtcGetErrorString(int status) {
  return status == kCompilation ? "HIPRTC_ERROR_COMPILATION" : status ? "HIPRTC_ERROR_OTHER" : "HIPRTC_SUCCESS";
}

int hiprtcVersion(int* major, int* minor) {
  *major = 7, *minor = 1;
  return kOk;
}

int hiprtcCreateProgram(Program** program, const char* source, const char* name, int headers,
                        const char* const* texts, const char* const* names) {
  record("hiprtcCreateProgram %s", name ? name : "-");
  if (!program || !source || !name || headers != 0 || texts || names) return kInvalidInput;
  int status = planted("hiprtcCreateProgram", kOk);
  if (status) return status;
  *program = calloc(1, sizeof **program);
  (*program)->alive = kAlive;
  (*program)->source = strdup(source);
  snprintf((*program)->name, sizeof (*program)->name, "%s", name);
  return kOk;
}

int hiprtcDestroyProgram(Program** program) {
  record("hiprtcDestroyProgram");
  if (!program || !*program || (*program)->alive != kAlive) return kInvalidProgram;
  free((*program)->source);
  memset(*program, 0, sizeof **program);
  free(*program);
  *program = NULL;
  return kOk;
}

/* The parameter list behind QK_SYMBOL( as a letter per parameter; some are there where something is added, some where
   codes are written, others where weights are not dense. */
static int read_parameters(const char* source, int added, int coded, int packed, char* letters) {
  static const char kAdded[] = "QK_IF_RESIDUAL(", kCoded[] = "QK_IF_CODES(", kMeta[] = "QK_META_PARAMETER(";
  const char* at = strstr(source, "\nQK_SYMBOL(");
  if (!at) return 0;
  at += strlen("\nQK_SYMBOL(");
  int count = 0, pointer = 0, some = 0, there = 0;
  for (;; ++at) {
    if (!*at || count == kMaxParameters) return 0;
    if (!strncmp(at, kAdded, strlen(kAdded))) some = 1, there = added, at += strlen(kAdded) - 1;
    if (!strncmp(at, kCoded, strlen(kCoded))) some = 1, there = coded, at += strlen(kCoded) - 1;
    if (!strncmp(at, kMeta, strlen(kMeta))) {
      if (packed) letters[count++] = 'p';
      at = strchr(at, ')');
      continue;
    }
    if (some) {
      some = *at != ')';
      if (!some || !there) continue;
    }
    if (*at == '*') pointer = 1;
    if (*at == ',' || *at == ')') {
      letters[count++] = pointer ? 'p' : 'i';
      pointer = 0;
      if (*at == ')') break;
    }
  }
  letters[count] = 0;
  return count;
}

int hiprtcCompileProgram(Program* program, int count, const char** options) {
  if (!program || program->alive != kAlive) return kInvalidProgram;
  const char *target = "", *symbol = "", *include = "";
  int macros = 0, added = 0, coded = 0, packed = 0;
  for (int i = 0; i < count; ++i) {
    if (!strncmp(options[i], "-DQK_RESIDUAL=", 14)) added = options[i][14] != '0';
    if (!strncmp(options[i], "-DQK_Y_FORMAT=", 14)) coded = 1;
    if (!strncmp(options[i], "-DQK_WEIGHTS=", 13)) packed = options[i][13] != '0';
    if (!strncmp(options[i], "--offload-arch=", 15)) target = options[i] + 15;
    if (!strncmp(options[i], "-DQK_SYMBOL=", 12)) symbol = options[i] + 12;
    if (!strncmp(options[i], "-I", 2)) include = options[i] + 2;
    if (!strncmp(options[i], "-D", 2)) ++macros;
  }
  record("hiprtcCompileProgram %s %s macros=%d", target, symbol, macros);
  char path[512], letters[kMaxParameters + 1];
  snprintf(path, sizeof path, "%s/platform.h", include);
  FILE* header = fopen(path, "r");
  if (!*target || !*symbol || !header) return kInvalidOption;
  fclose(header);
  int status = planted("hiprtcCompileProgram", read_parameters(program->source, added, coded, packed, letters) ? kOk : kCompilation);
  if (status) {
    snprintf(program->log, sizeof program->log, "%s:7:1: error: planted\n", program->name);
    return status;
  }
  snprintf(program->code, sizeof program->code, "%s\n%s\n%s\n%s\n", kMagic, target, symbol, letters);
  return kOk;
}

int hiprtcGetProgramLogSize(Program* program, size_t* size) {
  record("hiprtcGetProgramLogSize");
  *size = strlen(program->log) + 1;
  return planted("hiprtcGetProgramLogSize", kOk);
}
int hiprtcGetProgramLog(Program* program, char* log) {
  record("hiprtcGetProgramLog");
  strcpy(log, program->log);
  return planted("hiprtcGetProgramLog", kOk);
}
int hiprtcGetCodeSize(Program* program, size_t* size) {
  record("hiprtcGetCodeSize");
  *size = strlen(program->code);
  return planted("hiprtcGetCodeSize", *program->code ? kOk : kInternal);
}
int hiprtcGetCode(Program* program, char* code) {
  record("hiprtcGetCode");
  memcpy(code, program->code, strlen(program->code));
  return planted("hiprtcGetCode", *program->code ? kOk : kInternal);
}
#endif

#ifdef RUNTIME
/* ----------------------------------------------------------------------------------------------- runtime */
enum { kSuccess = 0, kInvalidValue = 1, kInvalidDevice = 101, kInvalidImage = 200, kNoBinary = 209,
       kInvalidHandle = 400, kNotFound = 500 };
enum { kModule = 0x40d01e, kFunction = 0xf2c7 };

typedef struct {
  uint32_t kind;
  char target[64], symbol[256], letters[kMaxParameters + 1];
} Module;
typedef struct {
  uint32_t kind;
  Module* module;
  int (*run)(const unsigned grid[3], void* const* args, int threads, char* error, int size);
} Function;

static __thread int device = 0;

const char* hipGetErrorName(int status) { return status == kNoBinary ? "hipErrorNoBinaryForGpu" : "hipErrorPlanted"; }
const char* hipGetErrorString(int status) { return status ? "a stand-in's error" : "no error"; }
int hipRuntimeGetVersion(int* version) {
  *version = 70152801;
  return kSuccess;
}
int hipSetDevice(int index) {
  record("hipSetDevice %d", index);
  int status = planted("hipSetDevice", index < 0 || index > 1 ? kInvalidDevice : kSuccess);
  if (!status) device = index;
  return status;
}

int hipModuleLoadData(Module** module, const void* image) {
  record("hipModuleLoadData device=%d", device);
  int status = planted("hipModuleLoadData", kSuccess);
  if (status) return status;
  Module* made = calloc(1, sizeof *made);
  char magic[32];
  if (!module || !image || sscanf(image, "%31[^\n]\n%63s\n%255s\n%64s", magic, made->target, made->symbol,
                                  made->letters) != 4 || strcmp(magic, kMagic)) {
    free(made);
    return kInvalidImage;
  }
  const char* target = getenv("STANDIN_TARGET");
  if (target && *target && strcmp(target, made->target)) {
    free(made);
    return kNoBinary;
  }
  made->kind = kModule;
  *module = made;
  return kSuccess;
}

int hipModuleGetFunction(Function** function, Module* module, const char* name) {
  record("hipModuleGetFunction %s", name);
  if (!module || module->kind != kModule) return kInvalidHandle;
  int status = planted("hipModuleGetFunction", strcmp(name, module->symbol) ? kNotFound : kSuccess);
  if (status) return status;
  Function* made = calloc(1, sizeof *made);
  made->kind = kFunction, made->module = module;
  const char* folder = getenv("STANDIN_KERNELS");
  if (folder && *folder) {
    char path[768];
    snprintf(path, sizeof path, "%s/%s.so", folder, name);
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    snprintf(path, sizeof path, "%s_launch", name);
    if (library) *(void**)&made->run = dlsym(library, path);
    if (!made->run) return kNotFound;
  }
  *function = made;
  return kSuccess;
}

int hipModuleLaunchKernel(Function* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned lds, void* stream, void** params, void** extra) {
  if (!f || f->kind != kFunction) return kInvalidHandle;
  char values[768] = "";
  int used = 0;
  if (!params == !extra) return kInvalidValue; /* exactly one of the two conventions */
  if (!gx || !gy || !gz || !bx || !by || !bz || bx * by * bz > 1024 || lds > 65536) return kInvalidValue;
  if ((uint64_t)gx * bx >> 32) return kInvalidValue; /* documented: work items of a dimension are below 2^32 */
  void* last = NULL;
  for (int i = 0; f->module->letters[i]; ++i) {
    if (!params || (uintptr_t)params[i] % 8) return kInvalidValue;
    if (f->module->letters[i] == 'p') {
      memcpy(&last, params[i], sizeof last);
      if ((uintptr_t)last % 16) return kInvalidValue; /* what the kernels ask for */
      used += snprintf(values + used, sizeof values - used, " %llu", (unsigned long long)(uintptr_t)last);
    } else {
      int32_t number;
      memcpy(&number, params[i], sizeof number);
      used += snprintf(values + used, sizeof values - used, " %d", number);
    }
  }
  record("hipModuleLaunchKernel %s grid=%u,%u,%u block=%u,%u,%u lds=%u stream=%llu device=%d args=%s",
         f->module->symbol, gx, gy, gz, bx, by, bz, lds, (unsigned long long)(uintptr_t)stream, device, values + 1);
  int status = planted("hipModuleLaunchKernel", kSuccess);
  if (status || !f->run) return status;
  const unsigned grid[3] = {gx, gy, gz};
  char error[256];
  status = f->run(grid, params, 1, error, sizeof error) ? 719 : kSuccess;
  const char* corrupt = getenv("STANDIN_CORRUPT");
  const int hit = corrupt && (!strcmp(corrupt, "1") || !strcmp(corrupt, f->module->symbol));
  if (hit && last) *(unsigned char*)last ^= 0x40;
  return status;
}
#endif
