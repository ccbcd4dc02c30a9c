//! The lines to an agent. A task writes them, because the agent may read slowly.

use std::{cell::Cell, rc::Rc};

use tokio::{
    io::AsyncWriteExt,
    net::unix::pipe,
    sync::{Notify, mpsc},
};

// An agent that asks without reading our replies is not read either (backpressure).
const MAX_UNREAD_REPLY_BYTES: usize = 1024 * 1024;

/// The queue of lines; dropping it closes the agent's stdin.
pub(super) struct Stdin {
    lines: mpsc::UnboundedSender<Line>,
    replies: Rc<Replies>,
}

struct Line {
    bytes: Vec<u8>,
    is_reply: bool,
}

/// The replies that the agent has not read.
#[derive(Default)]
pub(super) struct Replies {
    bytes: Cell<usize>,
    written: Notify,
}

impl Stdin {
    pub(super) fn new(pipe: Option<pipe::Sender>) -> Self {
        let (lines, queue) = mpsc::unbounded_channel();
        let replies = Rc::new(Replies::default());
        if let Some(pipe) = pipe {
            tokio::task::spawn_local(write(pipe, queue, Rc::clone(&replies)));
        }
        Self { lines, replies }
    }

    /// Sends a line of ours, such as a prompt.
    pub(super) fn send(&self, line: String) {
        self.push(line, false);
    }

    /// Sends the reply to a line of the agent.
    pub(super) fn reply(&self, line: String) {
        self.push(line, true);
    }

    fn push(&self, mut line: String, is_reply: bool) {
        line.push('\n');
        let bytes = line.into_bytes();
        let added = if is_reply { bytes.len() } else { 0 };
        // The exit of the agent is detected elsewhere.
        if self.lines.send(Line { bytes, is_reply }).is_ok() {
            self.replies.bytes.update(|bytes| bytes + added);
        }
    }

    pub(super) fn replies(&self) -> Rc<Replies> {
        Rc::clone(&self.replies)
    }
}

impl Replies {
    /// Waits until the agent has read most of its replies. Cancel-safe.
    pub(super) async fn wait_for_space(&self) {
        loop {
            let written = self.written.notified();
            if self.bytes.get() < MAX_UNREAD_REPLY_BYTES {
                return;
            }
            written.await;
        }
    }
}

async fn write(
    mut stdin: pipe::Sender,
    mut queue: mpsc::UnboundedReceiver<Line>,
    replies: Rc<Replies>,
) {
    while let Some(Line { bytes, is_reply }) = queue.recv().await {
        if stdin.write_all(&bytes).await.is_err() {
            break;
        }
        if is_reply {
            replies.bytes.update(|unread| unread - bytes.len());
            replies.written.notify_waiters();
        }
    }
    // The agent reads no more: no reply counts as unread, and none is queued.
    replies.bytes.set(0);
    replies.written.notify_waiters();
}

#[cfg(test)]
mod tests {
    use std::{
        future::Future,
        pin::pin,
        task::{Context, Waker},
    };

    use super::*;

    #[tokio::test]
    async fn unread_replies_hold_the_agent_back() {
        let (ours, theirs) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let test = async {
            let stdin = Stdin::new(Some(pipe::Sender::from_owned_fd(theirs).unwrap()));
            let replies = stdin.replies();
            let has_space = || {
                let mut context = Context::from_waker(Waker::noop());
                pin!(replies.wait_for_space()).poll(&mut context).is_ready()
            };
            stdin.send("p".repeat(2 * MAX_UNREAD_REPLY_BYTES));
            assert!(has_space(), "a prompt holds nothing back");
            stdin.reply("r".repeat(MAX_UNREAD_REPLY_BYTES));
            assert!(!has_space());
            let reader = pipe::Receiver::from_owned_fd(ours).unwrap();
            tokio::select! {
                () = crate::pipes::read_all(&reader, |_| {}) => {}
                () = replies.wait_for_space() => {}
            }
            assert!(has_space());
        };
        tokio::task::LocalSet::new().run_until(test).await;
    }
}
