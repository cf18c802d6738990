// Package runnerd makes the generated stubs of package runnerdv1 pleasant where they are not: a stream that is read
// in a loop and cancels its call when it is left, and error details as one value. Everything else is done with the stubs.
package runnerd
