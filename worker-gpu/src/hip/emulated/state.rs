//! The emulated driver: devices, memory, objects and captures.

use super::super::api::CopyKind;
use super::super::properties::{DeviceInfo, PciAddress};
use super::super::status::{self, Status};
use super::heap::{Heap, Owner};
use super::image::Image;
use super::ipc::Handle;
use super::work::{Entry, Stacks, Work};
use super::{Counters, Settings};
use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Instant;

/// Shared memory of a block, as much as the smallest real device has.
pub(super) const SHARED_BYTES: u32 = 64 << 10;

/// Number of a stream, event, module, function or graph; given out as an opaque handle.
pub(super) type Id = usize;

#[derive(Debug, Default)]
pub(super) struct StreamState {
    pub(super) capture: Option<Vec<Work>>,
    pub(super) hung: bool,
}

/// When an event's stream came to it.
#[derive(Debug, Clone, Copy)]
pub(super) enum Mark {
    Never,
    At(Instant),
    Hung,
}

#[derive(Debug)]
pub(super) enum Object {
    Stream(StreamState),
    Event(Mark),
    Module(Rc<Image>),
    Function(Entry, Id),
    Graph(Rc<[Work]>),
    GraphExec(Rc<[Work]>),
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) settings: Settings,
    pub(super) heap: Heap,
    pub(super) objects: BTreeMap<Id, Object>,
    next: Id,
    /// None until one was chosen.
    current: Option<u32>,
    pub(super) counters: Counters,
    pub(super) lost: Option<Status>,
    pub(super) message: Option<CString>,
    pub(super) stacks: Stacks,
}

impl State {
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            heap: Heap::default(),
            objects: BTreeMap::new(),
            // Handles look like addresses that nothing is mapped at.
            next: 0x100,
            current: None,
            counters: Counters::default(),
            lost: None,
            message: None,
            stacks: Stacks::default(),
        }
    }

    pub fn counters(&self) -> Counters {
        let functions = self.objects.values().filter(|object| matches!(object, Object::Function(..))).count();
        let out_of_order_frees = self.heap.out_of_order_frees();
        Counters {
            live: self.heap.len() + self.objects.len() - functions,
            out_of_order_frees,
            ..self.counters
        }
    }

    /// Counts a call; fails when the device is gone.
    pub fn enter(&mut self) -> Result<(), Status> {
        self.count()?;
        self.current.map_or(Ok(()), |current| self.check_present(current))
    }

    /// Counts a call; fails when one before has lost the device.
    pub fn count(&mut self) -> Result<(), Status> {
        self.counters.calls += 1;
        if self.settings.faults.lose_at_call.is_some_and(|nth| self.counters.calls >= nth) {
            self.lost = Some(status::UNKNOWN);
        }
        self.lost.map_or(Ok(()), Err)
    }

    /// Counts a call that takes a resource; fails when its turn has come.
    pub fn take(&mut self) -> Result<(), Status> {
        self.counters.allocations += 1;
        let fails = self.settings.faults.fail_allocation == Some(self.counters.allocations);
        if fails { Err(status::OUT_OF_MEMORY) } else { Ok(()) }
    }

    /// What a failed kernel said, for the status that it left.
    pub fn message(&self, status: Status) -> Option<&CStr> {
        self.message.as_deref().filter(|_| self.lost == Some(status))
    }

    // Devices

    pub fn devices(&self) -> u32 {
        self.settings.devices
    }

    pub fn choose(&mut self, ordinal: u32) -> Result<(), Status> {
        self.check_device(ordinal)?;
        self.check_present(ordinal)?;
        self.current = Some(ordinal);
        Ok(())
    }

    /// Whether nobody has taken a device away.
    fn check_present(&self, ordinal: u32) -> Result<(), Status> {
        let taken = |folder: &PathBuf| folder.join(ordinal.to_string()).exists();
        if self.settings.gone.as_ref().is_some_and(taken) { Err(status::UNKNOWN) } else { Ok(()) }
    }

    fn current(&self) -> u32 {
        self.current.unwrap_or(0)
    }

    pub fn check_device(&self, ordinal: u32) -> Result<(), Status> {
        if ordinal < self.settings.devices { Ok(()) } else { Err(status::INVALID_DEVICE) }
    }

    pub fn describe(&self, ordinal: u32) -> Result<DeviceInfo, Status> {
        self.check_device(ordinal)?;
        let wave = self.wave(ordinal)?;
        Ok(DeviceInfo {
            ordinal,
            name: "Spillway emulated device".to_owned(),
            arch: format!("emulated_wave{wave}"),
            uuid: self.uuid(ordinal),
            pci: PciAddress { domain: 0xffff, bus: ordinal, device: 0 },
            total_bytes: self.settings.memory.of(ordinal).ok_or(status::INVALID_DEVICE)?,
            compute_units: 1,
            wave,
            shared_bytes: SHARED_BYTES.into(),
            integrated: self.settings.integrated,
        })
    }

    fn wave(&self, ordinal: u32) -> Result<u32, Status> {
        self.settings.wave.of(ordinal).ok_or(status::INVALID_DEVICE)
    }

    /// An id that is the same in every process with the same settings.
    fn uuid(&self, ordinal: u32) -> Option<[u8; 16]> {
        let seed = self.settings.ids?;
        let mut uuid = [seed; 16];
        uuid[12..].copy_from_slice(&ordinal.to_be_bytes());
        Some(uuid)
    }

    /// Free and total bytes of the chosen device.
    pub fn memory(&self) -> (u64, u64) {
        let total = self.settings.memory.of(self.current()).unwrap_or(0);
        (total.saturating_sub(self.heap.device_bytes(self.current(), self.settings.page)), total)
    }

    // Memory

    pub fn malloc(&mut self, len: usize) -> Result<*mut u8, Status> {
        self.take()?;
        if len.next_multiple_of(self.settings.page) as u64 > self.memory().0 {
            return Err(status::OUT_OF_MEMORY);
        }
        self.heap.allocate(len, Owner::Device(self.current()))
    }

    pub fn host_malloc(&mut self, len: usize) -> Result<*mut u8, Status> {
        self.take()?;
        self.heap.allocate(len, Owner::Pinned)
    }

    pub fn free(&mut self, address: usize) -> Result<(), Status> {
        self.heap.free(address, |owner| matches!(owner, Owner::Device(_)))
    }

    pub fn host_free(&mut self, address: usize) -> Result<(), Status> {
        self.heap.free(address, |owner| owner == Owner::Pinned)
    }

    pub fn register(&mut self, address: usize, len: usize) -> Result<(), Status> {
        self.take()?;
        if self.settings.faults.refuse_register {
            return Err(status::NOT_SUPPORTED);
        }
        self.heap.register(address, len)
    }

    pub fn unregister(&mut self, address: usize) -> Result<(), Status> {
        self.heap.unregister(address)
    }

    /// Host memory that the device may address.
    pub fn check_mapped(&self, address: usize) -> Result<(), Status> {
        match self.heap.owner(address, 1)? {
            Some(Owner::Pinned | Owner::Registered) => Ok(()),
            _ => Err(status::INVALID_VALUE),
        }
    }

    /// Whether a copy's two ends are what its kind says.
    pub fn check_copy(&self, to: usize, from: usize, len: usize, kind: CopyKind) -> Result<(), Status> {
        let (to, from) = (self.heap.owner(to, len)?, self.heap.owner(from, len)?);
        let on_device = |owner: Option<Owner>| owner.is_some();
        let on_host = |owner: Option<Owner>| !matches!(owner, Some(Owner::Device(_) | Owner::Imported(_)));
        let right = match kind {
            CopyKind::HOST_TO_DEVICE => on_device(to) && on_host(from),
            CopyKind::DEVICE_TO_HOST => on_host(to) && on_device(from),
            CopyKind::DEVICE_TO_DEVICE => on_device(to) && on_device(from),
            _ => false,
        };
        if right { Ok(()) } else { Err(status::INVALID_VALUE) }
    }

    pub fn check_device_range(&self, ordinal: Option<u32>, address: usize, len: usize) -> Result<(), Status> {
        match (self.heap.owner(address, len)?, ordinal) {
            (Some(Owner::Device(owner) | Owner::Imported(owner)), Some(ordinal)) if owner == ordinal => {
                Ok(())
            }
            (Some(_), None) => Ok(()),
            _ => Err(status::INVALID_VALUE),
        }
    }

    /// Whether a copy goes from one device to another, or to another process.
    pub fn is_peer_copy(&self, to: usize, from: usize, len: usize) -> Result<bool, Status> {
        Ok(match (self.heap.owner(to, len)?, self.heap.owner(from, len)?) {
            (Some(Owner::Device(to)), Some(Owner::Device(from))) => to != from,
            (Some(Owner::Imported(_)), _) | (_, Some(Owner::Imported(_))) => true,
            _ => false,
        })
    }

    /// A handle with which other processes can open memory of a device.
    pub fn share(&mut self, address: usize) -> Result<[u8; 64], Status> {
        self.take()?;
        Ok(self.heap.share(address)?.to_bytes())
    }

    /// Opens another process's memory.
    pub fn import(&mut self, handle: [u8; 64]) -> Result<usize, Status> {
        self.take()?;
        let handle = Handle::from_bytes(handle)?;
        self.check_device(handle.ordinal)?;
        if self.settings.faults.refuse_peer {
            return Err(status::NOT_SUPPORTED);
        }
        self.heap.import(&handle)
    }

    // Objects

    pub fn create(&mut self, object: Object) -> Result<Id, Status> {
        self.take()?;
        Ok(self.insert(object))
    }

    fn insert(&mut self, object: Object) -> Id {
        let id = self.next;
        self.next += 0x10;
        self.objects.insert(id, object);
        id
    }

    /// Removes an object of the kind that `is` accepts.
    pub fn destroy(&mut self, id: Id, is: impl Fn(&Object) -> bool) -> Result<(), Status> {
        if !self.objects.get(&id).is_some_and(is) {
            return Err(status::INVALID_HANDLE);
        }
        self.objects.remove(&id);
        self.objects.retain(|_, object| !matches!(object, Object::Function(_, module) if *module == id));
        Ok(())
    }

    pub fn function(&mut self, module: Id, name: &CStr) -> Result<Id, Status> {
        let Some(Object::Module(image)) = self.objects.get(&module) else {
            return Err(status::INVALID_HANDLE);
        };
        let entry = Entry::new(image, name, self.wave(self.current())?)?;
        Ok(self.insert(Object::Function(entry, module)))
    }

    pub fn entry(&self, function: Id) -> Result<&Entry, Status> {
        match self.objects.get(&function) {
            Some(Object::Function(entry, _)) => Ok(entry),
            _ => Err(status::INVALID_HANDLE),
        }
    }

    pub(super) fn stream(&mut self, id: Id) -> Result<&mut StreamState, Status> {
        match self.objects.get_mut(&id) {
            Some(Object::Stream(stream)) => Ok(stream),
            _ => Err(status::INVALID_HANDLE),
        }
    }

    /// An event's mark.
    pub fn mark(&self, event: Id) -> Result<Mark, Status> {
        match self.objects.get(&event) {
            Some(Object::Event(mark)) => Ok(*mark),
            _ => Err(status::INVALID_HANDLE),
        }
    }

    /// Whether a stream still works; it does only when a kernel hangs.
    pub fn is_hung(&mut self, stream: Id) -> Result<bool, Status> {
        let stream = self.stream(stream)?;
        if stream.capture.is_some() { Err(status::CAPTURE_UNSUPPORTED) } else { Ok(stream.hung) }
    }

    pub fn any_hung(&self) -> bool {
        self.objects.values().any(|object| matches!(object, Object::Stream(stream) if stream.hung))
    }

    // Capture

    pub fn begin_capture(&mut self, stream: Id) -> Result<(), Status> {
        let stream = self.stream(stream)?;
        if stream.capture.is_some() {
            return Err(status::ILLEGAL_STATE);
        }
        stream.capture = Some(Vec::new());
        Ok(())
    }

    pub fn end_capture(&mut self, stream: Id) -> Result<Id, Status> {
        let work = self.stream(stream)?.capture.take().ok_or(status::CAPTURE_UNMATCHED)?;
        self.create(Object::Graph(work.into()))
    }

    pub fn instantiate(&mut self, graph: Id) -> Result<Id, Status> {
        let Some(Object::Graph(work)) = self.objects.get(&graph) else { return Err(status::INVALID_HANDLE) };
        let work = Rc::clone(work);
        self.create(Object::GraphExec(work))
    }

    pub fn replay(&mut self, exec: Id, stream: Id) -> Result<(), Status> {
        let Some(Object::GraphExec(work)) = self.objects.get(&exec) else {
            return Err(status::INVALID_HANDLE);
        };
        let work = Rc::clone(work);
        work.iter().try_for_each(|work| self.queue(stream, work.clone()))
    }
}
