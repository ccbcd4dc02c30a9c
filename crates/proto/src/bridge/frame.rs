//! Encoding and decoding of bridge frames.

use serde::{Serialize, de::DeserializeOwned};

use super::{MAX_CONTROL_BYTES, MAX_DATA_BYTES, StreamId};

/// A frame of either direction.
#[derive(Debug, Clone, PartialEq)]
pub enum Frame<Message> {
    /// A message.
    Control(Message),
    /// Bytes of a stream.
    Data {
        /// Number of the stream.
        stream: StreamId,
        /// At most [`MAX_DATA_BYTES`].
        bytes: Vec<u8>,
    },
}

/// Why bytes are not frames. Only after [`FrameError::Message`] can the connection be used further.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The length exceeds the limit: garbage, or another protocol.
    #[error("bridge frame of {length} bytes exceeds the limit")]
    TooLong {
        /// Length in the frame's header.
        length: usize,
    },
    /// The kind is unknown, or the frame is too short for its kind.
    #[error("bridge frame has the unknown kind {kind}")]
    Kind {
        /// Kind byte of the frame.
        kind: u8,
    },
    /// The message is not valid JSON for this protocol.
    #[error("cannot parse a bridge message")]
    Message {
        /// The message, which is no longer in the decoder.
        message: Vec<u8>,
        /// Why it is invalid.
        source: serde_json::Error,
    },
}

impl<Message: Serialize> Frame<Message> {
    /// Encodes the frame.
    ///
    /// # Panics
    /// When a data frame is longer than [`MAX_DATA_BYTES`], a bug of the caller.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut frame = vec![0; 5];
        match self {
            Self::Control(message) => serde_json::to_writer(&mut frame, message)
                .expect("messages hold only maps with text keys"),
            Self::Data { stream, bytes } => {
                assert!(bytes.len() <= MAX_DATA_BYTES, "the sender splits data frames");
                frame[4] = 1;
                frame.extend_from_slice(&stream.to_be_bytes());
                frame.extend_from_slice(bytes);
            }
        }
        let length = u32::try_from(frame.len() - 4).expect("frames are far below 4 GiB");
        frame[..4].copy_from_slice(&length.to_be_bytes());
        frame
    }
}

/// Decodes a stream of bytes into frames.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
}

impl Decoder {
    /// Adds received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Takes the next complete frame, if there is one.
    ///
    /// # Errors
    /// When the bytes are not bridge frames.
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
            Some((0, message)) => match crate::json::from_slice(message) {
                Ok(message) => Frame::Control(message),
                Err(source) => {
                    let message = message.to_vec();
                    self.remove(4 + length);
                    return Err(FrameError::Message { message, source });
                }
            },
            Some((1, data)) if data.len() >= 4 => Frame::Data {
                stream: u32::from_be_bytes([data[0], data[1], data[2], data[3]]),
                bytes: data[4..].to_vec(),
            },
            other => return Err(FrameError::Kind { kind: other.map_or(255, |(kind, _)| *kind) }),
        };
        self.remove(4 + length);
        Ok(Some(frame))
    }

    fn remove(&mut self, bytes: usize) {
        self.buffer.drain(..bytes);
        if self.buffer.is_empty() {
            // Release the memory: the next frame may not arrive for a long time.
            self.buffer = Vec::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bridge::{FileRequest, FromSupervisor, OutboxEvent, ToSupervisor};
    use proptest::prelude::*;

    #[test]
    fn oversized_frame_is_refused_from_its_header() {
        let mut decoder = Decoder::default();
        decoder.push(&[0xff, 0xff, 0xff, 0xff]);
        assert!(matches!(decoder.take::<ToSupervisor>(), Err(FrameError::TooLong { .. })));
    }

    #[test]
    fn unknown_message_is_an_error() {
        let mut decoder = Decoder::default();
        decoder.push(&[0, 0, 0, 3, 0, b'{', b'}']);
        assert!(matches!(decoder.take::<ToSupervisor>(), Err(FrameError::Message { .. })));
        assert!(matches!(decoder.take::<ToSupervisor>(), Ok(None)), "the message is skipped");
    }

    #[test]
    fn event_with_private_key_is_unreadable() {
        let event = r#"{"say":"event","number":7,"at":"2026-01-02T03:04:05Z","turn":null,
            "body":{"type":"tool_started","call":"c","name":"n",
            "input":{"$serde_json::private::RawValue":"[]"}}}"#;
        let mut frame = u32::try_from(event.len() + 1).unwrap().to_be_bytes().to_vec();
        frame.push(0);
        frame.extend_from_slice(event.as_bytes());
        let mut decoder = Decoder::default();
        decoder.push(&frame);
        let taken = decoder.take::<FromSupervisor>();
        let Err(FrameError::Message { message, .. }) = taken else { panic!("{taken:?}") };
        assert_eq!(OutboxEvent::unreadable(&message).unwrap().number, 7);
    }

    #[test]
    fn unreadable_event_keeps_number_and_time() {
        let deep = format!("{}{}", "[".repeat(1000), "]".repeat(1000));
        let event = format!(
            r#"{{"say":"event","number":7,"at":"2026-01-02T03:04:05Z","turn":null,
            "body":{{"type":"tool_started","call":"c","name":"n","input":{deep}}}}}"#
        );
        let mut frame = u32::try_from(event.len() + 1).unwrap().to_be_bytes().to_vec();
        frame.push(0);
        frame.extend_from_slice(event.as_bytes());
        let mut decoder = Decoder::default();
        decoder.push(&frame);
        let Err(FrameError::Message { message, .. }) = decoder.take::<FromSupervisor>() else {
            panic!("the event is too deep for the parser")
        };
        let event = OutboxEvent::unreadable(&message).unwrap();
        assert_eq!(event.number, 7);
        assert!(matches!(event.body, crate::EventBody::Warning { .. }));
        assert_eq!(OutboxEvent::unreadable(br#"{"say":"pong"}"#), None);
        let corrupt = message.iter().map(|byte| if *byte == b'n' { byte ^ 0x80 } else { *byte });
        assert_eq!(OutboxEvent::unreadable(&corrupt.collect::<Vec<_>>()), None);
    }

    fn any_frame() -> impl Strategy<Value = Frame<ToSupervisor>> {
        prop_oneof![
            (any::<u32>(), any::<u32>())
                .prop_map(|(stream, bytes)| Frame::Control(ToSupervisor::Credit { stream, bytes })),
            (any::<u64>(), ".*").prop_map(|(id, path)| Frame::Control(ToSupervisor::File {
                id,
                user: None,
                request: FileRequest::Stat { path, follow: false }
            })),
            (any::<u32>(), proptest::collection::vec(any::<u8>(), 0..300))
                .prop_map(|(stream, bytes)| Frame::Data { stream, bytes }),
        ]
    }

    proptest! {
        #[test]
        fn frames_survive_any_chunking(
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
