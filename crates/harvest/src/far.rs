//! The files of a sandbox by way of whoever answers for it, for who copies and may block: each call waits on the
//! runtime of the thread that started the copy. Bytes pass in pieces.

use std::{
    io::{self, Read, Write},
    sync::Arc,
};

use anyhow::{Context, Result};
use futures_util::StreamExt;
use harvest_engine::guest::Far;
use harvest_proto::{
    SandboxId, SessionId,
    api::Page,
    bridge::{FileKind, FileStat},
};
use harvest_server::here::{Pieces, Sent};
use reqwest::{Method, header::HeaderMap};
use tokio::{runtime::Handle, sync::mpsc, task::JoinHandle};

use crate::{
    client::Client,
    desk::{self, Desk},
    printer::Refused,
};

/// A piece of a file on its way: what one frame of the bridge holds.
const PIECE_BYTES: usize = 64 * 1024;

/// Pieces between the disk and the network.
const PIECES: usize = 4;

/// The files of a sandbox, its session's or one's own.
pub(crate) struct Files {
    desk: Arc<Desk>,
    /// The route of its files.
    route: String,
    runtime: Handle,
}

impl Files {
    /// Of a session's sandbox. To be used on a thread that may block.
    pub(crate) fn of_session(client: Client, session: &SessionId) -> Self {
        let desk = Arc::new(Desk::of(client));
        Self { desk, route: format!("/v1/sessions/{session}/files"), runtime: Handle::current() }
    }

    /// Of a sandbox of one's own. To be used on a thread that may block.
    pub(crate) fn of_sandbox(desk: Desk, sandbox: &SandboxId) -> Self {
        let desk = Arc::new(desk);
        Self { desk, route: format!("/v1/sandboxes/{sandbox}/files"), runtime: Handle::current() }
    }

    fn path(&self, words: &[(&str, &str)]) -> String {
        format!("{}?{}", self.route, crate::client::query(words))
    }

    fn ask(&self, method: Method, words: &[(&str, &str)]) -> Result<(HeaderMap, Pieces)> {
        self.runtime.block_on(self.desk.carry(method, &self.path(words), Sent::Nothing))
    }

    fn put(&self, path: &str, words: &[(&str, &str)], user: Option<&str>, sent: Sent) -> Putting {
        let mut all = vec![("path", path)];
        all.extend(user.map(|user| ("user", user)));
        all.extend(words);
        let (desk, path) = (Arc::clone(&self.desk), self.path(&all));
        self.runtime.spawn(async move { desk.carry(Method::PUT, &path, sent).await.map(drop) })
    }
}

/// A file on its way in.
type Putting = JoinHandle<Result<()>>;

fn is_folder(headers: &HeaderMap) -> bool {
    headers.get("x-harvest-kind").is_some_and(|kind| kind == "folder")
}

impl Far for Files {
    type Error = anyhow::Error;

    fn local(error: io::Error) -> anyhow::Error {
        anyhow::Error::new(error).context("the copy failed on this machine")
    }

    fn is_missing(error: &anyhow::Error) -> bool {
        error.downcast_ref::<Refused>().is_some_and(|refused| refused.0.status == 404)
    }

    fn stat(&mut self, path: &str) -> Result<FileStat> {
        let answer = self.ask(Method::HEAD, &[("path", path)]).map_err(|error| {
            match Self::is_missing(&error) {
                true => error.context(format!("there is nothing at {path} in the sandbox")),
                false => error,
            }
        });
        described(path, &answer?.0).context("the server does not say what it is")
    }

    fn list_all(&mut self, path: &str) -> Result<Vec<FileStat>> {
        let mut all = Vec::new();
        let mut cursor: Option<String> = None;
        loop {
            let mut words = vec![("path", path), ("limit", "1000")];
            words.extend(cursor.as_deref().map(|cursor| ("cursor", cursor)));
            let (headers, body) = self.ask(Method::GET, &words)?;
            anyhow::ensure!(is_folder(&headers), "{path} is not a folder");
            let page: Page<FileStat> = self.runtime.block_on(desk::whole(body))?;
            all.extend(page.items);
            cursor = page.next_cursor;
            if cursor.is_none() {
                return Ok(all);
            }
        }
    }

    fn read(&mut self, path: &str, to: &mut dyn Write) -> Result<()> {
        let (headers, mut body) = self.ask(Method::GET, &[("path", path)])?;
        anyhow::ensure!(!is_folder(&headers), "{path} is a folder by now");
        while let Some(piece) = self.runtime.block_on(body.next()) {
            let piece = piece.with_context(|| format!("{path} did not come to its end"))?;
            to.write_all(&piece).map_err(Self::local)?;
        }
        Ok(())
    }

    fn write(
        &mut self,
        path: &str,
        mode: u32,
        user: Option<&str>,
        from: &mut dyn Read,
    ) -> Result<()> {
        let (sender, mut receiver) = mpsc::channel::<io::Result<Vec<u8>>>(PIECES);
        let pieces = futures_util::stream::poll_fn(move |context| receiver.poll_recv(context));
        let sent = Sent::Stream("application/octet-stream", pieces.boxed());
        let sent = self.put(path, &[("mode", &format!("{mode:o}"))], user, sent);
        let fed = feed(from, &sender);
        drop(sender);
        let answer = self.runtime.block_on(sent)?;
        // What went wrong here is the reason for whatever the server made of it.
        fed.map_err(Self::local)?;
        answer
    }

    fn make_folder(&mut self, path: &str, mode: u32, user: Option<&str>) -> Result<()> {
        let mode = format!("{mode:o}");
        let made = self.put(path, &[("kind", "folder"), ("mode", &mode)], user, Sent::Nothing);
        self.runtime.block_on(made)?
    }

    fn make_link(&mut self, path: &str, target: &str, user: Option<&str>) -> Result<()> {
        let made = self.put(path, &[("kind", "link"), ("target", target)], user, Sent::Nothing);
        self.runtime.block_on(made)?
    }

    fn read_link(&mut self, path: &str) -> Result<String> {
        self.stat(path)?.target.with_context(|| format!("{path} is no link by now"))
    }
}

/// Hands a file over in pieces. Nobody takes them any more when the server has said no.
fn feed(from: &mut dyn Read, to: &mpsc::Sender<io::Result<Vec<u8>>>) -> io::Result<()> {
    loop {
        let mut piece = vec![0; PIECE_BYTES];
        match from.read(&mut piece) {
            Ok(0) => return Ok(()),
            Ok(count) => {
                piece.truncate(count);
                if to.blocking_send(Ok(piece)).is_err() {
                    return Ok(());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                // The request must break off: ended in order, it would leave half a file.
                let _ = to.blocking_send(Err(error.kind().into()));
                return Err(error);
            }
        }
    }
}

/// A description as the server puts it into headers.
fn described(path: &str, headers: &HeaderMap) -> Option<FileStat> {
    let text = |name: &str| headers.get(name)?.to_str().ok();
    let kind = match text("x-harvest-kind")? {
        "file" => FileKind::File,
        "folder" => FileKind::Folder,
        "link" => FileKind::Link,
        _ => FileKind::Other,
    };
    Some(FileStat {
        name: path.rsplit('/').next().unwrap_or_default().to_owned(),
        kind,
        size: text("x-harvest-size")?.parse().ok()?,
        mode: u32::from_str_radix(text("x-harvest-mode")?, 8).ok()?,
        uid: text("x-harvest-uid")?.parse().ok()?,
        // Nobody asks for it here.
        modified: harvest_proto::Timestamp::from_millis(0),
        target: text("x-harvest-target").and_then(unescaped),
    })
}

/// A text as it was before the server made it fit into a header.
fn unescaped(text: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        if *first == b'%' {
            let (digits, after) = rest.split_at_checked(2)?;
            bytes.push(u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
            rest = after;
        } else {
            bytes.push(*first);
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_targets_letters_come_back_as_they_were() {
        assert_eq!(unescaped("/a%20b/%C3%A4%0A%25").as_deref(), Some("/a b/ä\n%"));
        assert_eq!((unescaped("%"), unescaped("%zz"), unescaped("%ff")), (None, None, None));
    }

    #[test]
    fn a_file_that_cannot_be_read_on_breaks_the_request_off() {
        struct Bad;
        impl Read for Bad {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::ErrorKind::StaleNetworkFileHandle.into())
            }
        }
        let (sender, mut receiver) = mpsc::channel(PIECES);
        assert!(feed(&mut Bad, &sender).is_err());
        assert!(receiver.try_recv().unwrap().is_err());
    }
}
