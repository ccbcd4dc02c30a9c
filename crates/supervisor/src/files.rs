//! Reads, writes, describes and lists files for a connection. Bytes stream through: no file is ever
//! held whole. A file appears under its name complete or not at all.

mod place;
mod shape;

use std::{
    ffi::OsStr,
    fs::{self, File, Metadata},
    io::{self, Write},
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    rc::Rc,
    sync::Arc,
};

use harvest_proto::{
    Timestamp,
    bridge::{
        Fault, FaultCode, FileKind, FileRequest, FileStat, FromSupervisor, MAX_CONTROL_BYTES,
        MAX_DATA_BYTES, Reply, RequestId, StreamId,
    },
};
use rustix::{fs::OFlags, io::Errno};
use tokio::task::spawn_blocking;

use self::place::Place;
use crate::{
    connection::Connection,
    cut, log,
    streams::{Credit, Inbox},
    users::User,
};

/// Checks a request and carries it out beside everything else.
pub(crate) fn start(
    connection: &Rc<Connection>,
    id: RequestId,
    request: FileRequest,
) -> Result<(), Fault> {
    let (FileRequest::Read { path, .. }
    | FileRequest::Write { path, .. }
    | FileRequest::Stat { path, .. }
    | FileRequest::List { path, .. }
    | FileRequest::Mkdir { path, .. }
    | FileRequest::Symlink { path, .. }
    | FileRequest::ReadLink { path }
    | FileRequest::Remove { path, .. }) = &request
    else {
        return Err(Fault::new(FaultCode::Invalid, "this supervisor does not know that request"));
    };
    if !path.starts_with('/') || path.contains('\0') {
        return Err(Fault::new(FaultCode::Invalid, format!("`{path}` is not an absolute path")));
    }
    let path = PathBuf::from(path);
    let here = Rc::clone(connection);
    match request {
        FileRequest::Read { stream, .. } => {
            let credit = connection.sends(stream)?;
            let given_up = connection.killable(id);
            connection.spawn(async move {
                tokio::select! {
                    () = read(&here, id, &path, stream, &credit) => {}
                    () = given_up.notified() => here.forget(stream),
                }
                here.no_longer_killable(id);
            });
        }
        FileRequest::Write { mode, user, stream, .. } => {
            let user = connection.supervisor.user(user.as_deref())?;
            let inbox = connection.receives(stream)?;
            let given_up = connection.killable(id);
            connection.spawn(async move {
                let written = tokio::select! {
                    written = write(&here, &path, mode, user, stream, &inbox) => written,
                    // What was written of it goes, too.
                    () = given_up.notified() => Err(io::ErrorKind::Interrupted.into()),
                };
                here.no_longer_killable(id);
                here.forget(stream);
                here.reply(id, written.map(|()| Reply::Done).map_err(|error| fault(&path, &error)))
                    .await;
            });
        }
        FileRequest::Stat { follow, .. } => connection.spawn(async move {
            let result = blocking(path, move |path| describe(path, follow));
            here.reply(id, result.await.map(Reply::Stat)).await;
        }),
        FileRequest::List { after, .. } => connection.spawn(async move {
            let result = blocking(path, move |path| list(path, after.as_deref()));
            here.reply(id, result.await.map(|(entries, more)| Reply::List { entries, more })).await;
        }),
        request => {
            let work = shape::work(&connection.supervisor, request)?;
            connection.spawn(async move { here.reply(id, blocking(path, work).await).await });
        }
    }
    Ok(())
}

async fn blocking<T: Send + 'static>(
    path: PathBuf,
    work: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
) -> Result<T, Fault> {
    let worked = spawn_blocking(move || work(&path).map_err(|error| fault(&path, &error))).await;
    worked.unwrap_or_else(|_| Err(Fault::new(FaultCode::System, "the file work was cut off")))
}

async fn read(
    connection: &Rc<Connection>,
    id: RequestId,
    path: &Path,
    stream: StreamId,
    credit: &Credit,
) {
    let file = match blocking(path.to_owned(), open_readable).await {
        Ok(file) => Arc::new(file),
        Err(fault) => {
            connection.forget(stream);
            return connection.reply(id, Err(fault)).await;
        }
    };
    // First, so that a dialer that waits for it before it reads on cannot wait for ever.
    connection.reply(id, Ok(Reply::Done)).await;
    let mut offset = 0u64;
    loop {
        let may = credit.available(MAX_DATA_BYTES).await;
        let same = Arc::clone(&file);
        let piece = spawn_blocking(move || {
            let mut buffer = vec![0u8; may];
            let count = same.read_at(&mut buffer, offset)?;
            buffer.truncate(count);
            Ok::<_, io::Error>(buffer)
        });
        match piece.await.unwrap_or_else(|_| Err(io::ErrorKind::Interrupted.into())) {
            Ok(bytes) if bytes.is_empty() => break,
            Ok(bytes) => {
                credit.spend(bytes.len());
                offset += bytes.len() as u64;
                connection.data(stream, &bytes).await;
            }
            Err(error) => {
                // An end here would pass for the file's own.
                log::line(format_args!("cannot read on a file: {error}"));
                return connection.broken.notify_one();
            }
        }
    }
    connection.end(stream).await;
}

/// Opens a regular file to read. Without waiting: opening a pipe would block until somebody writes.
pub(crate) fn open_regular(path: &Path) -> io::Result<File> {
    let file = place::open(path, OFlags::RDONLY | OFlags::NONBLOCK)?;
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    Ok(file)
}

/// Opens a regular file of which a first byte, if there is one, can be read: some in `/proc` open and then
/// refuse, which is better said than shown by hanging up.
fn open_readable(path: &Path) -> io::Result<File> {
    let file = open_regular(path)?;
    file.read_at(&mut [0u8; 1], 0)?;
    Ok(file)
}

async fn write(
    connection: &Rc<Connection>,
    path: &Path,
    mode: u32,
    user: User,
    stream: StreamId,
    inbox: &Inbox,
) -> io::Result<()> {
    let target = path.to_owned();
    let unfinished = on_thread(move || Unfinished::new(&target, mode, &user)).await?;
    let unfinished = Arc::new(unfinished);
    while let Some(bytes) = inbox.take().await {
        let (same, length) = (Arc::clone(&unfinished), bytes.len());
        on_thread(move || (&same.file).write_all(&bytes)).await?;
        let bytes = inbox.used(length);
        connection.say(FromSupervisor::Credit { stream, bytes }).await;
    }
    on_thread(move || unfinished.finish()).await
}

async fn on_thread<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    spawn_blocking(work).await.unwrap_or_else(|_| Err(io::ErrorKind::Interrupted.into()))
}

/// A file being written beside its place; removed unless it is finished.
struct Unfinished {
    file: File,
    temporary: PathBuf,
    place: Place,
}

impl Unfinished {
    fn new(target: &Path, mode: u32, user: &User) -> io::Result<Self> {
        let place = Place::of(target)?;
        if place.path().is_dir() {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        let temporary = place.beside(&temporary_name(target.file_name().unwrap_or_default()));
        // Born without rights and without following a link: nobody inside sees half a file.
        let file =
            fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        let unfinished = Self { file, temporary, place };
        let (uid, gid) = (rustix::fs::Uid::from_raw(user.uid), rustix::fs::Gid::from_raw(user.gid));
        rustix::fs::fchown(&unfinished.file, Some(uid), Some(gid))?;
        // After the owner, which clears the set-id bits.
        unfinished.file.set_permissions(fs::Permissions::from_mode(mode & 0o7777))?;
        Ok(unfinished)
    }

    fn finish(&self) -> io::Result<()> {
        self.file.sync_all()?;
        fs::rename(&self.temporary, self.place.path())?;
        self.place.sync()
    }
}

impl Drop for Unfinished {
    // Harmless after `finish`: the name is no longer there.
    fn drop(&mut self) {
        let _already_renamed = fs::remove_file(&self.temporary);
    }
}

fn temporary_name(name: &OsStr) -> String {
    // Cut: the whole must stay below the 255 bytes a name may have. An id of ours is as random as
    // a name needs to be.
    let name = name.to_string_lossy();
    format!(".{}.{}.part", cut::head(&name, 100), harvest_proto::SandboxId::random().part())
}

/// The entries by name, and whether there are more than fit a reply; who cannot ask for those is told so.
fn list(path: &Path, after: Option<&str>) -> io::Result<(Vec<FileStat>, bool)> {
    // What a frame takes around the entries.
    const FRAME_BYTES: usize = 4 * 1024;
    // Held while it is listed: the way to it may lead elsewhere a moment later.
    let folder = place::open(path, OFlags::RDONLY | OFlags::DIRECTORY)?;
    let path = place::through(&folder);
    let mut names = Vec::new();
    for entry in fs::read_dir(&path)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort_unstable();
    let mut entries = Vec::new();
    let mut bytes = FRAME_BYTES;
    for name in names.into_iter().filter(|name| after.is_none_or(|after| name.as_str() > after)) {
        let Ok(metadata) = fs::symlink_metadata(path.join(&name)) else { continue };
        let target = metadata.is_symlink().then(|| target(&path.join(&name))).flatten();
        let entry = FileStat { target, ..stat(name, &metadata) };
        // As it is written, with a comma: a character of one byte may take six there.
        bytes += cut::encoded(&entry) + 1;
        if bytes > MAX_CONTROL_BYTES {
            let words = "the folder has more entries than fit a reply";
            let unasked = || io::Error::new(io::ErrorKind::InvalidInput, words);
            return after.map(|_| (entries, true)).ok_or_else(unasked);
        }
        entries.push(entry);
    }
    Ok((entries, false))
}

fn name(path: &Path) -> String {
    path.file_name().map_or_else(|| "/".to_owned(), |name| name.to_string_lossy().into_owned())
}

fn stat(name: String, metadata: &Metadata) -> FileStat {
    let kind = match metadata.file_type() {
        kind if kind.is_file() => FileKind::File,
        kind if kind.is_dir() => FileKind::Folder,
        kind if kind.is_symlink() => FileKind::Link,
        _ => FileKind::Other,
    };
    let modified = metadata.modified().map_or_else(|_| Timestamp::from_millis(0), Timestamp::from);
    FileStat {
        name,
        kind,
        size: metadata.len(),
        mode: metadata.mode() & 0o7777,
        uid: metadata.uid(),
        modified,
        target: None,
    }
}

fn target(link: &Path) -> Option<String> {
    Some(fs::read_link(link).ok()?.to_string_lossy().into_owned())
}

/// What a path is: a link itself, or what it leads to.
fn describe(path: &Path, follow: bool) -> io::Result<FileStat> {
    if follow || path.file_name().is_none() {
        let there = place::open(path, OFlags::PATH)?;
        return Ok(stat(name(path), &there.metadata()?));
    }
    let place = Place::of(path)?;
    let metadata = fs::symlink_metadata(place.path())?;
    let target = metadata.is_symlink().then(|| target(place.path())).flatten();
    Ok(FileStat { target, ..stat(name(path), &metadata) })
}

fn fault(path: &Path, error: &io::Error) -> Fault {
    use io::ErrorKind as Kind;
    let code = match error.kind() {
        Kind::NotFound | Kind::NotADirectory => FaultCode::NotFound,
        Kind::PermissionDenied | Kind::ReadOnlyFilesystem => FaultCode::Denied,
        Kind::InvalidInput | Kind::IsADirectory | Kind::InvalidFilename | Kind::AlreadyExists => {
            FaultCode::Invalid
        }
        // Links that lead in a circle, or out of the tree of files (see `place`).
        _ if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => FaultCode::Denied,
        _ => FaultCode::System,
    };
    let full = matches!(error.kind(), Kind::StorageFull | Kind::QuotaExceeded | Kind::FileTooLarge);
    Fault { full, ..Fault::new(code, format!("{}: {error}", path.display())) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harvest_proto::bridge::Frame;

    #[test]
    fn a_folder_of_hostile_names_is_listed_in_frames_that_are_read() {
        let folder = tempfile::tempdir().unwrap();
        for number in 0..300 {
            let name = format!("{number:03}{}", "\u{1}".repeat(200));
            std::os::unix::fs::symlink("\u{1}".repeat(2000), folder.path().join(name)).unwrap();
        }
        let (mut after, mut listed) = (String::new(), 0);
        loop {
            let (entries, more) = list(folder.path(), Some(&after)).unwrap();
            after = entries.last().unwrap().name.clone();
            listed += entries.len();
            let reply =
                FromSupervisor::Reply { id: u64::MAX, result: Ok(Reply::List { entries, more }) };
            let mut decoder = harvest_proto::bridge::Decoder::default();
            decoder.push(&Frame::Control(reply).encode());
            assert!(decoder.take::<FromSupervisor>().is_ok(), "the other side would hang up");
            if !more {
                break;
            }
        }
        assert_eq!(listed, 300);
        assert!(list(folder.path(), None).is_err(), "who cannot ask for more is told");
    }
}
