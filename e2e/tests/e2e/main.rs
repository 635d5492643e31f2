//! Black-box tests on a real Kubernetes cluster: one file per behavior, run by `cargo xtask test`.
//!
//! Each test has its own namespace with its own operators, so several tests run concurrently. Tests that break nodes or
//! the control plane are in a module `alone`. They run one at a time, after all other tests.

#![allow(clippy::large_futures)] // Each test is one large future.

mod adopt_coreos;
mod all_pods_lost;
mod ambient_identity;
mod api_outage;
mod api_rules;
mod auth;
mod backup_crash;
mod backup_pvc;
mod backup_pvc_tls;
mod backup_restore_s3;
mod backup_schedule;
mod backup_stores;
mod bad_input;
mod bootstrap;
mod certificates;
mod chart_install;
mod chart_render;
mod chart_second_release;
mod chart_values;
mod clusterwide;
mod concurrent_restores;
mod corrupt_alarm;
mod corrupt_member;
mod crash_access;
mod defrag;
mod dns_cached;
mod dns_down;
mod drain;
mod etcd_env;
mod fixtures;
mod hibernate;
mod join_statefulset;
mod manual_changes;
mod manual_removal;
mod member_loss;
mod network_policy;
mod node_loss;
mod node_reboot;
mod noisy_neighbor;
mod nospace;
mod object_repair;
mod old_etcd;
mod operator_crash;
mod operator_upgrade;
mod paused;
mod quorum_loss;
mod restore_crash;
mod restore_failures;
mod restore_in_place;
mod restore_interrupted;
mod restore_other_namespace;
mod restore_seed;
mod restore_sources;
mod restore_storage;
mod restricted_namespace;
mod rollout;
mod scale_edges;
mod storage_class_change;
mod tls_backup_restore;
mod tls_bad_secrets;
mod tls_generated;
mod tls_lost_authority;
mod tls_quorum_loss;
mod tls_refused;
mod tls_rotation_generated;
mod tls_rotation_static;
mod tls_static;
mod tls_switch;
mod two_operators;
mod upgrade;
mod volume_growth;
