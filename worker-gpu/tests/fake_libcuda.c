// Stands in for libcuda in tests/cuda_provider.rs: two devices on host memory, and one kernel that adds vectors.
// Signatures follow cuda.h of CUDA 12. Every value that a caller can get wrong is checked or shows in a result.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
typedef uint64_t Address;
typedef struct { char bytes[64]; } IpcHandle;

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, INVALID_PTX = 218,
       NOT_FOUND = 500, PEER_ALREADY = 704, MISALIGNED_ADDRESS = 716 };
enum { DEVICES = 2, DEVICE = 0x70, CONTEXT = 0x1000 };  // handles that no number given by mistake equals

static uintptr_t current;  // context
static int peers;
static int dynamic_limit;

static void *pointer(Address address) { return (void *)(uintptr_t)address; }
static Result need_context(void) { return current ? SUCCESS : INVALID_CONTEXT; }

Result cuInit(unsigned flags) { return flags ? INVALID_VALUE : SUCCESS; }
Result cuDriverGetVersion(int *version) { *version = 12040; return SUCCESS; }
Result cuDeviceGetCount(int *count) { *count = DEVICES; return SUCCESS; }
Result cuDeviceGet(int *device, int ordinal) {
  if (ordinal < 0 || ordinal >= DEVICES) return INVALID_DEVICE;
  *device = DEVICE + ordinal;
  return SUCCESS;
}
Result cuDeviceGetName(char *name, int len, int device) {
  snprintf(name, len, "Fake %d", device - DEVICE);
  return SUCCESS;
}
Result cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, device, 16); return SUCCESS; }
Result cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = device >= DEVICE ? 1 << 20 : 0; return SUCCESS; }
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case 8: *value = 49152; break;
    case 10: *value = 32; break;
    case 16: *value = 132; break;
    case 18: *value = 0; break;
    case 33: *value = 0xc0 + device - DEVICE; break;
    case 34: *value = 1; break;
    case 50: *value = 2; break;
    case 75: *value = 9; break;
    case 76: *value = 0; break;
    case 97: *value = 232448; break;
    default: return INVALID_VALUE;
  }
  return SUCCESS;
}
Result cuDevicePrimaryCtxRetain(void **context, int device) {
  *context = (void *)(uintptr_t)(CONTEXT + device);
  return SUCCESS;
}
Result cuCtxSetCurrent(void *context) { current = (uintptr_t)context; return SUCCESS; }
Result cuCtxSynchronize(void) { return need_context(); }
Result cuMemGetInfo_v2(size_t *free, size_t *total) { *free = 1 << 19; *total = 1 << 20; return need_context(); }

Result cuMemAlloc_v2(Address *address, size_t bytes) {
  if (bytes > 1 << 20) return OUT_OF_MEMORY;
  *address = (Address)(uintptr_t)malloc(bytes);
  return need_context();
}
Result cuMemFree_v2(Address address) { free(pointer(address)); return SUCCESS; }
Result cuMemHostAlloc(void **address, size_t bytes, unsigned flags) {
  *address = malloc(bytes);
  return flags == 3 ? SUCCESS : INVALID_VALUE;  // portable and mapped
}
Result cuMemFreeHost(void *address) { free(address); return SUCCESS; }
Result cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags) {
  return address && bytes && flags == 3 ? SUCCESS : INVALID_VALUE;
}
Result cuMemHostUnregister(void *address) { return address ? SUCCESS : INVALID_VALUE; }
Result cuMemHostGetDevicePointer_v2(Address *on_device, void *address, unsigned flags) {
  *on_device = (Address)(uintptr_t)address;
  return flags;
}

Result cuMemcpyHtoD_v2(Address to, const void *from, size_t bytes) { memcpy(pointer(to), from, bytes); return SUCCESS; }
Result cuMemcpyDtoH_v2(void *to, Address from, size_t bytes) { memcpy(to, pointer(from), bytes); return SUCCESS; }
Result cuMemcpyDtoD_v2(Address to, Address from, size_t bytes) { memcpy(pointer(to), pointer(from), bytes); return SUCCESS; }
static Result on_stream(void *stream) { return stream == (void *)0x51 ? SUCCESS : INVALID_VALUE; }
Result cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t bytes, void *stream) {
  cuMemcpyHtoD_v2(to, from, bytes);
  return on_stream(stream);
}
Result cuMemcpyDtoHAsync_v2(void *to, Address from, size_t bytes, void *stream) {
  cuMemcpyDtoH_v2(to, from, bytes);
  return on_stream(stream);
}
Result cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, void *stream) {
  cuMemcpyDtoD_v2(to, from, bytes);
  return on_stream(stream);
}
Result cuMemcpyPeerAsync(Address to, void *there, Address from, void *here, size_t bytes, void *stream) {
  if (there != (void *)(CONTEXT + DEVICE + 1ul) || here != (void *)(CONTEXT + DEVICE + 0ul)) return INVALID_CONTEXT;
  return cuMemcpyDtoDAsync_v2(to, from, bytes, stream);
}
Result cuMemsetD8Async(Address to, unsigned char value, size_t bytes, void *stream) {
  memset(pointer(to), value, bytes);
  return on_stream(stream);
}

Result cuStreamCreate(void **stream, unsigned flags) { *stream = (void *)0x51; return flags == 1 ? SUCCESS : INVALID_VALUE; }
Result cuStreamDestroy_v2(void *stream) { return on_stream(stream); }
Result cuStreamSynchronize(void *stream) { return on_stream(stream); }
Result cuStreamQuery(void *stream) { return on_stream(stream) ? INVALID_VALUE : 600; }
Result cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
  return event == (void *)0xe1 && !flags ? on_stream(stream) : INVALID_VALUE;
}
Result cuStreamBeginCapture_v2(void *stream, unsigned mode) { return mode == 1 ? on_stream(stream) : INVALID_VALUE; }
Result cuStreamEndCapture(void *stream, void **graph) { *graph = (void *)0x61; return on_stream(stream); }
Result cuEventCreate(void **event, unsigned flags) { *event = (void *)0xe1; return flags == 2 || !flags ? SUCCESS : INVALID_VALUE; }
Result cuEventDestroy_v2(void *event) { return event == (void *)0xe1 ? SUCCESS : INVALID_VALUE; }
Result cuEventRecord(void *event, void *stream) { return event == (void *)0xe1 ? on_stream(stream) : INVALID_VALUE; }
Result cuEventSynchronize(void *event) { return cuEventDestroy_v2(event); }
Result cuEventQuery(void *event) { return cuEventDestroy_v2(event); }
Result cuEventElapsedTime(float *milliseconds, void *start, void *stop) {
  *milliseconds = 2.5f;
  return start == stop ? SUCCESS : INVALID_VALUE;
}

Result cuModuleLoadDataEx(void **module, const void *image, unsigned count, int *options, void **values) {
  if (count != 2 || options[0] != 5 || options[1] != 6) return INVALID_VALUE;
  if (strcmp(image, "good image") != 0) {
    snprintf(values[0], (size_t)values[1], "line 1: this is no image");
    return INVALID_PTX;
  }
  *module = (void *)0x71;
  return SUCCESS;
}
Result cuModuleUnload(void *module) { return module == (void *)0x71 ? SUCCESS : INVALID_VALUE; }
Result cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = (void *)0xf1;
  return module == (void *)0x71 && strcmp(name, "add") == 0 ? SUCCESS : NOT_FOUND;
}
Result cuFuncGetAttribute(int *value, int attribute, void *function) {
  static const int values[] = {256, 1024, 0, 0, 40};
  *value = values[attribute];
  return function == (void *)0xf1 ? SUCCESS : INVALID_VALUE;
}
Result cuFuncSetAttribute(void *function, int attribute, int value) {
  dynamic_limit = value;
  return function == (void *)0xf1 && attribute == 8 ? SUCCESS : INVALID_VALUE;
}
// add(float *to, const float *from, unsigned count) over blocks x threads; dynamic shared memory must have been allowed.
Result cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, void *stream, void **arguments, void **extra) {
  if (function != (void *)0xf1 || by != 1 || bz != 1 || extra || (int)shared > dynamic_limit) return INVALID_VALUE;
  float *to = *(float **)arguments[0], *from = *(float **)arguments[1];
  unsigned count = *(unsigned *)arguments[2];
  if ((uintptr_t)to % 4) return MISALIGNED_ADDRESS;
  for (unsigned i = 0; i < gx * gy * gz * bx && i < count; i++) to[i] += from[i];
  return on_stream(stream);
}
Result cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags) {
  *exec = (void *)0x81;
  return graph == (void *)0x61 && !flags ? SUCCESS : INVALID_VALUE;
}
Result cuGraphLaunch(void *exec, void *stream) { return exec == (void *)0x81 ? on_stream(stream) : INVALID_VALUE; }
Result cuGraphExecDestroy(void *exec) { return exec == (void *)0x81 ? SUCCESS : INVALID_VALUE; }
Result cuGraphDestroy(void *graph) { return graph == (void *)0x61 ? SUCCESS : INVALID_VALUE; }

Result cuDeviceCanAccessPeer(int *can, int device, int peer) { *can = device >= DEVICE && peer == device + 1; return SUCCESS; }
Result cuCtxEnablePeerAccess(void *context, unsigned flags) {
  if (context != (void *)(CONTEXT + DEVICE + 0ul) || flags) return INVALID_VALUE;
  return peers++ ? PEER_ALREADY : SUCCESS;
}
Result cuCtxDisablePeerAccess(void *context) { return context == (void *)(CONTEXT + DEVICE + 0ul) ? SUCCESS : INVALID_VALUE; }
Result cuIpcGetMemHandle(IpcHandle *handle, Address address) { memcpy(handle, &address, sizeof address); return SUCCESS; }
Result cuIpcOpenMemHandle_v2(Address *address, IpcHandle handle, unsigned flags) {
  memcpy(address, &handle, sizeof *address);
  return flags == 1 ? SUCCESS : INVALID_VALUE;
}
Result cuIpcCloseMemHandle(Address address) { return address ? SUCCESS : INVALID_VALUE; }
