//! Bodies of the HTTP API, shared by the server, the CLI and the tests. One file per resource.

mod common;
mod exec;
mod history;
pub mod machines;
mod prompts;
mod repositories;
mod secrets;
mod sessions;
mod snapshots;
mod sockets;
mod tokens;

pub use common::{Page, Problem};
pub use exec::{ExecLine, ExecRequest};
pub use history::{
    ChangeKind, DiffFiles, DiffStat, Dropped, FileDiff, Held, MachineChange, MachineChanges,
    PinSnapshot, Retained,
};
pub use prompts::{CreatePrompt, MovePrompt, Prompt, PromptStatus, Turn};
pub use repositories::{AddRepository, Build, BuildLine, Evidence, Pull, Repository};
pub use secrets::SetSecret;
pub use sessions::{
    CreateSession, ForkSession, RestoreSession, Session, SessionRepository, SessionState,
    UseRepository,
};
pub use snapshots::Snapshot;
pub use sockets::{STDERR, STDOUT, SocketIn, SocketOut};
pub use tokens::{CreateToken, CreatedToken, Me, Role, Token};
