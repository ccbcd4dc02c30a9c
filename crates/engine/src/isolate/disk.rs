//! The steps that assemble a sandbox's file system: layers, `/proc`, `/dev`, binds, volumes, the
//! new root.

use std::os::fd::AsFd;

use super::{
    SpawnContext, StepRunner,
    mounts::{RootTree, Scratch},
    out_of_order,
    users::use_file_ids,
};
use crate::{
    error::{Doing, StepError},
    plan::Step,
};

impl StepRunner {
    pub(super) fn disk_step(
        &mut self,
        step: &Step,
        context: &SpawnContext<'_>,
    ) -> Result<(), StepError> {
        match step {
            Step::Scratch => {
                self.scratch = Some(Scratch::make()?);
                // Files created here belong to root inside.
                use_file_ids(context.first_id)
            }
            Step::Overlay { lowers } => {
                // An overlay uses its creator's ids: with ids unknown to the layers it could write
                // nothing.
                use_file_ids(context.first_id)?;
                let root = self.scratch()?.overlay(lowers).doing(|| "mount the overlay")?;
                self.tree = Some(RootTree { root });
                Ok(())
            }
            Step::AssembleRoot => {
                let moved = self.scratch()?.assemble_root(self.tree()?);
                moved.doing(|| "move /proc, /dev and /sys into the root")
            }
            Step::Root => {
                let tree = self.tree.take().ok_or_else(out_of_order)?;
                self.scratch = None;
                tree.enter().doing(|| "enter the new root")
            }
            Step::Layer { .. } | Step::Writable | Step::Bind { .. } | Step::Volume { .. } => {
                self.mount_passed(step, context)
            }
            _ => self.create(step, context),
        }
    }

    /// Steps that mount something of the host, passed as a descriptor.
    fn mount_passed(&self, step: &Step, context: &SpawnContext<'_>) -> Result<(), StepError> {
        let passed = |number: usize| self.passed.get(number).ok_or_else(out_of_order);
        let ids = (context.first_id != 0).then_some(context.users.as_fd());
        match step {
            Step::Layer { from, name } => self
                .scratch()?
                .layer(passed(from.number)?, name, ids)
                .doing(|| format!("attach the layer {}", from.path.display())),
            Step::Writable => {
                let folder = &self.assignment()?.writable;
                let attached = self.scratch()?.writable(folder, ids);
                attached.doing(|| format!("attach {}", folder.display()))
            }
            Step::Bind { from, inside } => self
                .tree()?
                .bind(passed(from.number)?, inside)
                .doing(|| format!("bind {} to {}", from.path.display(), inside.display())),
            Step::Volume { from, inside, read_only } => {
                let attached = self.tree()?.volume(passed(from.number)?, inside, *read_only, ids);
                let (volume, inside) = (from.path.display(), inside.display());
                attached.doing(|| format!("attach the volume {volume} to {inside}"))
            }
            _ => Err(out_of_order()),
        }
    }

    /// Steps that create a file or file system for this sandbox.
    fn create(&mut self, step: &Step, context: &SpawnContext<'_>) -> Result<(), StepError> {
        match step {
            Step::Proc => self.prepared()?.proc().doing(|| "mount /proc"),
            Step::Dev { nodes } => {
                let nodes =
                    nodes.iter().map(|(name, (major, minor))| (name.as_str(), *major, *minor));
                self.prepared()?.dev(nodes, context.first_id).doing(|| "create /dev")
            }
            Step::Shm { bytes } => self.tree()?.shm(*bytes).doing(|| "mount /dev/shm"),
            Step::Sys(view) => self.prepared()?.sys(view).doing(|| "create /sys"),
            Step::SysFiles { files } => {
                self.tree()?.finish_sys(files).doing(|| "create the files of /sys")
            }
            Step::Mask { paths } => {
                self.prepared()?.mask(paths, self.scratch()?).doing(|| "mask parts of /proc")
            }
            Step::ReadOnly { paths } => {
                self.prepared()?.read_only(paths).doing(|| "make parts of /proc read-only")
            }
            Step::File { inside, text, writer } => {
                self.files += 1;
                let (scratch, tree) = (self.scratch()?, self.tree()?);
                let made = scratch.file(self.files, text).and_then(|(file, mount)| {
                    tree.on_file(&mount, inside)?;
                    Ok(file)
                });
                let file = made.doing(|| format!("create {}", inside.display()))?;
                self.inherited.extend(writer.map(|descriptor| (descriptor, file)));
                Ok(())
            }
            Step::Pid1Folder { inside, writer } => {
                let made = self.scratch()?.pid1_folder(*writer);
                let (writable, shown) = made.doing(|| format!("create {}", inside.display()))?;
                let attached = self.tree()?.on_real_folder(&shown, inside);
                attached.doing(|| format!("mount {}", inside.display()))?;
                self.inherited.push((*writer, writable));
                Ok(())
            }
            _ => Err(out_of_order()),
        }
    }

    pub(super) fn scratch(&self) -> Result<&Scratch, StepError> {
        self.scratch.as_ref().ok_or_else(out_of_order)
    }

    fn prepared(&self) -> Result<RootTree, StepError> {
        self.scratch()?.prepared().doing(|| "open the prepared mounts")
    }

    fn tree(&self) -> Result<&RootTree, StepError> {
        self.tree.as_ref().ok_or_else(out_of_order)
    }
}
