//! Frames as bytes, and bytes as frames again.

use serde::{Serialize, de::DeserializeOwned};

use super::{MAX_CONTROL_BYTES, MAX_DATA_BYTES, StreamId};

/// One frame, either way.
#[derive(Debug, Clone, PartialEq)]
pub enum Frame<Message> {
    /// A message.
    Control(Message),
    /// Bytes of a stream.
    Data {
        /// Which.
        stream: StreamId,
        /// At most [`MAX_DATA_BYTES`].
        bytes: Vec<u8>,
    },
}

/// Why bytes are not frames. The connection is of no use afterwards.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// A length beyond the limits: garbage, or not our protocol.
    #[error("a bridge frame of {length} bytes is longer than any we send")]
    TooLong {
        /// The length it gave.
        length: usize,
    },
    /// A kind we do not know, or a frame too short for its kind.
    #[error("a bridge frame has the unknown kind {kind}")]
    Kind {
        /// The byte.
        kind: u8,
    },
    /// A message we do not know.
    #[error("a bridge message cannot be read")]
    Message(#[from] serde_json::Error),
}

impl<Message: Serialize> Frame<Message> {
    /// The frame's bytes.
    ///
    /// # Panics
    /// When a data frame is longer than [`MAX_DATA_BYTES`], which is a mistake of the caller.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let (kind, head, body) = match self {
            Self::Control(message) => (
                0,
                Vec::new(),
                serde_json::to_vec(message).expect("messages hold only maps with text keys"),
            ),
            Self::Data { stream, bytes } => {
                assert!(bytes.len() <= MAX_DATA_BYTES, "a data frame is cut by its sender");
                (1, stream.to_be_bytes().to_vec(), bytes.clone())
            }
        };
        let length =
            u32::try_from(1 + head.len() + body.len()).expect("frames are far below 4 GiB");
        [&length.to_be_bytes()[..], &[kind], &head, &body].concat()
    }
}

/// Turns bytes into frames, whatever pieces they arrive in.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
}

impl Decoder {
    /// Adds bytes as they came.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole frame, if it has arrived.
    ///
    /// # Errors
    /// When the bytes are not ours.
    pub fn take<Message: DeserializeOwned>(
        &mut self,
    ) -> Result<Option<Frame<Message>>, FrameError> {
        let Some(head) = self.buffer.first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_be_bytes(*head) as usize;
        if length > MAX_CONTROL_BYTES + 5 {
            return Err(FrameError::TooLong { length });
        }
        let Some(body) = self.buffer.get(4..4 + length) else { return Ok(None) };
        let frame = match body.split_first() {
            Some((0, message)) => Frame::Control(serde_json::from_slice(message)?),
            Some((1, data)) if data.len() >= 4 => Frame::Data {
                stream: u32::from_be_bytes([data[0], data[1], data[2], data[3]]),
                bytes: data[4..].to_vec(),
            },
            other => return Err(FrameError::Kind { kind: other.map_or(255, |(kind, _)| *kind) }),
        };
        self.buffer.drain(..4 + length);
        if self.buffer.is_empty() {
            // The next bytes may be long in coming.
            self.buffer = Vec::new();
        }
        Ok(Some(frame))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bridge::{Command, FileRequest, FromSupervisor, Reply, ToSupervisor};
    use proptest::prelude::*;

    #[test]
    fn a_length_nobody_sends_is_refused_before_it_is_waited_for() {
        let mut decoder = Decoder::default();
        decoder.push(&[0xff, 0xff, 0xff, 0xff]);
        assert!(matches!(decoder.take::<ToSupervisor>(), Err(FrameError::TooLong { .. })));
    }

    #[test]
    fn a_file_request_of_a_later_version_is_understood_as_such() {
        let text = r#"{"say":"file","id":7,"request":{"do":"chown_tree","path":"/x"}}"#;
        let message: ToSupervisor = serde_json::from_str(text).unwrap();
        assert_eq!(message, ToSupervisor::File { id: 7, request: FileRequest::Unknown });
    }

    #[test]
    fn an_older_side_neither_asks_for_what_is_new_nor_claims_it() {
        let text = r#"{"argv":["sh"],"env":{},"cwd":null,"user":null,"timeout_millis":null,"stdin":null,
            "stdout":1,"stderr":2}"#;
        let command: Command = serde_json::from_str(text).unwrap();
        assert_eq!((&command.terminal, command.detached), (&None, false));
        let again = serde_json::to_string(&command).unwrap();
        assert!(!again.contains("terminal") && !again.contains("detached"));
        let heartbeat: FromSupervisor =
            serde_json::from_str(r#"{"say":"heartbeat","busy":true}"#).unwrap();
        assert_eq!(heartbeat, FromSupervisor::Heartbeat { busy: true, detached: 0 });
        let started: Reply = serde_json::from_str(r#"{"reply":"started","pid":7}"#).unwrap();
        assert_eq!(started, Reply::Started { pid: 7, terminal: false });
    }

    #[test]
    fn an_unknown_message_is_an_error_not_a_panic() {
        let mut decoder = Decoder::default();
        decoder.push(&[0, 0, 0, 3, 0, b'{', b'}']);
        assert!(matches!(decoder.take::<ToSupervisor>(), Err(FrameError::Message(_))));
    }

    fn any_frame() -> impl Strategy<Value = Frame<ToSupervisor>> {
        prop_oneof![
            (any::<u32>(), any::<u32>())
                .prop_map(|(stream, bytes)| Frame::Control(ToSupervisor::Credit { stream, bytes })),
            (any::<u64>(), ".*").prop_map(|(id, path)| Frame::Control(ToSupervisor::File {
                id,
                request: FileRequest::Stat { path, follow: false }
            })),
            (any::<u32>(), proptest::collection::vec(any::<u8>(), 0..300))
                .prop_map(|(stream, bytes)| Frame::Data { stream, bytes }),
        ]
    }

    proptest! {
        #[test]
        fn frames_survive_being_cut_anywhere(
            frames in proptest::collection::vec(any_frame(), 0..8),
            cut in 1usize..64,
        ) {
            let bytes: Vec<u8> = frames.iter().flat_map(Frame::encode).collect();
            let mut decoder = Decoder::default();
            let mut seen = Vec::new();
            for piece in bytes.chunks(cut) {
                decoder.push(piece);
                while let Some(frame) = decoder.take::<ToSupervisor>().unwrap() {
                    seen.push(frame);
                }
            }
            prop_assert_eq!(seen, frames);
        }

        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut decoder = Decoder::default();
            decoder.push(&bytes);
            while let Ok(Some(_)) = decoder.take::<FromSupervisor>() {}
        }
    }
}
