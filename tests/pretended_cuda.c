/* A driver of CUDA that keeps "GPU memory" in memory files, so that it can be exported, mapped and copied on any Linux
   machine. It takes the arguments of cuda.h, which the compiler checks, and refuses what the real one would.

   PRETENDED_CUDA_FAILS names a call that fails, or says NO_EXPORT (nothing can be exported) or NO_READ_ONLY (maps are
   always for writing, too). */
#define _GNU_SOURCE
#include <cuda.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define PAGE ((size_t)65536)
#define CALL(name) do { if (fails(name)) return CUDA_ERROR_NOT_SUPPORTED; } while (0)

static int fails(const char *name) {
    const char *which = getenv("PRETENDED_CUDA_FAILS");
    return which && !strcmp(which, name);
}

static int is_wrong(const CUmemAllocationProp *prop) {
    return prop->type != CU_MEM_ALLOCATION_TYPE_PINNED || prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
           prop->requestedHandleTypes != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || prop->win32HandleMetaData ||
           prop->allocFlags.compressionType || prop->allocFlags.gpuDirectRDMACapable || prop->allocFlags.usage;
}

CUresult CUDAAPI cuInit(unsigned int flags) {
    CALL("cuInit");
    return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "pretended error";
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    CALL("cuDeviceGetAttribute");
    if (attribute != CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED || device) return CUDA_ERROR_INVALID_VALUE;
    *value = !fails("NO_EXPORT");
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags option) {
    CALL("cuMemGetAllocationGranularity");
    *size = PAGE;
    return is_wrong(prop) || option != CU_MEM_ALLOC_GRANULARITY_MINIMUM ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop, unsigned long long flags) {
    CALL("cuMemCreate");
    if (is_wrong(prop) || flags || !size || size % PAGE) return CUDA_ERROR_INVALID_VALUE;
    if (size > (size_t)1 << 40) return CUDA_ERROR_OUT_OF_MEMORY;
    int fd = memfd_create("pretended-gpu", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, size)) return CUDA_ERROR_OUT_OF_MEMORY;
    if (pwrite(fd, "full of what was there before", 29, 0) != 29) return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = (CUmemGenericAllocationHandle)fd;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
    CALL("cuMemRelease");
    return close((int)handle) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags) {
    CALL("cuMemExportToShareableHandle");
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags) return CUDA_ERROR_INVALID_VALUE;
    *(int *)out = dup((int)handle);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *given, CUmemAllocationHandleType type) {
    CALL("cuMemImportFromShareableHandle");
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
    int fd = dup((int)(intptr_t)given);
    *handle = (CUmemGenericAllocationHandle)fd;
    return fd < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr hint, unsigned long long flags) {
    CALL("cuMemAddressReserve");
    if (size % PAGE || alignment || hint || flags) return CUDA_ERROR_INVALID_VALUE;
    void *found = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *address = (CUdeviceptr)(uintptr_t)found;
    return found == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAddressFree(CUdeviceptr address, size_t size) {
    return munmap((void *)(uintptr_t)address, size) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    CALL("cuMemMap");
    struct stat found;
    if (offset || flags || fstat((int)handle, &found) || (size_t)found.st_size < size) return CUDA_ERROR_INVALID_VALUE;
    void *wanted = (void *)(uintptr_t)address;
    void *mapped = mmap(wanted, size, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)handle, 0);
    return mapped == wanted ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemUnmap(CUdeviceptr address, size_t size) {
    void *wanted = (void *)(uintptr_t)address;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    return mmap(wanted, size, PROT_NONE, flags, -1, 0) == wanted ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count) {
    CALL("cuMemSetAccess");
    if (count != 1 || access->location.type != CU_MEM_LOCATION_TYPE_DEVICE || access->location.id) return CUDA_ERROR_INVALID_DEVICE;
    int reads = access->flags == CU_MEM_ACCESS_FLAGS_PROT_READ;
    if (reads && fails("NO_READ_ONLY")) return CUDA_ERROR_INVALID_VALUE;
    if (!reads && access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) return CUDA_ERROR_INVALID_VALUE;
    int rights = reads ? PROT_READ : PROT_READ | PROT_WRITE;
    return mprotect((void *)(uintptr_t)address, size, rights) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    CALL("cuMemcpyAsync");
    (void)stream;
    memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, size);
    return CUDA_SUCCESS;
}
