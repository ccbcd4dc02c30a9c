//! Machines without a session: sandboxes of one's own, commands in them, and what the host keeps for
//! them. Everything here is about the machine the server runs on.

mod disks;
mod images;
mod sandboxes;

pub use disks::{
    Collect, Collected, CreateVolume, DiskRoom, DiskUsage, Finding, FindingLevel, MachineSnapshot,
    Owned, SandboxUsed, StoreFile, Used, Volume, VolumeBacking,
};
pub use images::{
    Image, ImageConfig, ImageLayer, ImageLine, ImageOrigin, ImageUsage, ImageUsers, MakeImage,
};
pub use sandboxes::{
    CreateSandbox, CreatedSandbox, ExecOnce, ForkSandbox, ForkedSandbox, Language, RestoreSandbox,
    RestoredSandbox, RunCommand, Sandbox, SandboxLimits, SandboxList, SandboxNetwork,
    SandboxSnapshot, SandboxStatus, TornSandbox, VolumeMount,
};
