//! Connects to Unix sockets whose path may be longer than a socket address can hold.

use std::{
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::fs::OpenOptionsExt as _,
    },
    path::{Path, PathBuf},
};

use tokio::net::UnixStream;

/// Connects to a Unix socket.
pub(super) async fn connect(path: &Path) -> std::io::Result<UnixStream> {
    let (_folder, short) = short_path(path)?;
    UnixStream::connect(short).await
}

/// As [`connect`], blocking. The stream is non-blocking, ready for a runtime.
pub(super) fn connect_blocking(path: &Path) -> std::io::Result<std::os::unix::net::UnixStream> {
    let (_folder, short) = short_path(path)?;
    let stream = std::os::unix::net::UnixStream::connect(short)?;
    stream.set_nonblocking(true)?;
    Ok(stream)
}

/// A short path to a socket, valid while the returned descriptor of its folder is open.
fn short_path(path: &Path) -> std::io::Result<(OwnedFd, PathBuf)> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(std::io::ErrorKind::InvalidInput.into());
    };
    // O_PATH: the folder is only used to resolve the socket.
    let folder = std::fs::File::options().read(true).custom_flags(0o10_000_000).open(folder)?;
    let folder = OwnedFd::from(folder);
    let short = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name);
    Ok((folder, short))
}
