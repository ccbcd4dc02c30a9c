//! The files of a session's sandbox by way of the server, for who copies and may block: each call waits on the
//! runtime of the thread that started the copy. Bytes pass in pieces.

use std::io::{self, Read, Write};

use anyhow::{Context, Result};
use harvest_engine::guest::Far;
use harvest_proto::{
    SessionId,
    api::Page,
    bridge::{FileKind, FileStat},
};
use reqwest::{Body, Method, RequestBuilder, Response, header::HeaderMap};
use tokio::{runtime::Handle, sync::mpsc};

use crate::{client::Client, printer::Refused};

/// A piece of a file on its way: what one frame of the bridge holds.
const PIECE_BYTES: usize = 64 * 1024;

/// Pieces between the disk and the network.
const PIECES: usize = 4;

/// A session's files.
pub(crate) struct SessionFiles {
    client: Client,
    session: SessionId,
    runtime: Handle,
}

impl SessionFiles {
    /// To be used on a thread that may block.
    pub(crate) fn new(client: Client, session: SessionId) -> Self {
        Self { client, session, runtime: Handle::current() }
    }

    fn request(&self, method: Method, words: &[(&str, &str)]) -> RequestBuilder {
        let path = format!("/v1/sessions/{}/files?{}", self.session, crate::client::query(words));
        self.client.request(method, &path)
    }

    fn ask(&self, request: RequestBuilder) -> Result<Response> {
        self.runtime.block_on(self.client.send(request))
    }

    fn put(&self, path: &str, words: &[(&str, &str)], user: Option<&str>) -> RequestBuilder {
        let mut all = vec![("path", path)];
        all.extend(user.map(|user| ("user", user)));
        all.extend(words);
        self.request(Method::PUT, &all)
    }
}

impl Far for SessionFiles {
    type Error = anyhow::Error;

    fn local(error: io::Error) -> anyhow::Error {
        anyhow::Error::new(error).context("the copy failed on this machine")
    }

    fn is_missing(error: &anyhow::Error) -> bool {
        error.downcast_ref::<Refused>().is_some_and(|refused| refused.0.status == 404)
    }

    fn stat(&mut self, path: &str) -> Result<FileStat> {
        let answer =
            self.ask(self.request(Method::HEAD, &[("path", path)])).map_err(
                |error| match Self::is_missing(&error) {
                    true => error.context(format!("there is nothing at {path} in the session's sandbox")),
                    false => error,
                },
            )?;
        described(path, answer.headers()).context("the server does not say what it is")
    }

    fn list_all(&mut self, path: &str) -> Result<Vec<FileStat>> {
        let mut all = Vec::new();
        let mut cursor: Option<String> = None;
        loop {
            let mut words = vec![("path", path), ("limit", "1000")];
            words.extend(cursor.as_deref().map(|cursor| ("cursor", cursor)));
            let answer = self.ask(self.request(Method::GET, &words))?;
            let is_folder = answer.headers().get("x-harvest-kind").is_some_and(|kind| kind == "folder");
            anyhow::ensure!(is_folder, "{path} is not a folder");
            let page: Page<FileStat> =
                self.runtime.block_on(answer.json()).context("cannot make sense of the server's answer")?;
            all.extend(page.items);
            cursor = page.next_cursor;
            if cursor.is_none() {
                return Ok(all);
            }
        }
    }

    fn read(&mut self, path: &str, to: &mut dyn Write) -> Result<()> {
        let mut answer = self.ask(self.request(Method::GET, &[("path", path)]))?;
        let is_folder = answer.headers().get("x-harvest-kind").is_some_and(|kind| kind == "folder");
        anyhow::ensure!(!is_folder, "{path} is a folder by now");
        let cut = || format!("{path} did not come to its end");
        while let Some(piece) = self.runtime.block_on(answer.chunk()).with_context(cut)? {
            to.write_all(&piece).map_err(Self::local)?;
        }
        Ok(())
    }

    fn write(&mut self, path: &str, mode: u32, user: Option<&str>, from: &mut dyn Read) -> Result<()> {
        let (sender, mut receiver) = mpsc::channel::<io::Result<Vec<u8>>>(PIECES);
        let pieces = futures_util::stream::poll_fn(move |context| receiver.poll_recv(context));
        let request = self.put(path, &[("mode", &format!("{mode:o}"))], user).body(Body::wrap_stream(pieces));
        let sent = self.runtime.spawn(self.client.send(request));
        let fed = feed(from, &sender);
        drop(sender);
        let answer = self.runtime.block_on(sent)?;
        // What went wrong here is the reason for whatever the server made of it.
        fed.map_err(Self::local)?;
        answer.map(drop)
    }

    fn make_folder(&mut self, path: &str, mode: u32, user: Option<&str>) -> Result<()> {
        let mode = format!("{mode:o}");
        self.ask(self.put(path, &[("kind", "folder"), ("mode", &mode)], user)).map(drop)
    }

    fn make_link(&mut self, path: &str, target: &str, user: Option<&str>) -> Result<()> {
        self.ask(self.put(path, &[("kind", "link"), ("target", target)], user)).map(drop)
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
